"""Exercise S2.4: what requests get among others they get alone, token for token.

Promises: lengths are drawn by a fixed seed, prompts are new to the server; every answer is asked for a second time when
nothing else runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quire_bench.exercises.logs import recorded
from quire_bench.exercises.own import OwnServers
from quire_bench.facts.fact import Fact
from quire_bench.facts.live import Live

_REQUESTS = 10
_SEED = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request with exact lengths."""

    prompt: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The answers to requests that were sent together, with their preemptions and chunked prompts."""

    answers: list[tuple[int, ...]]
    preemptions: int
    chunked: int  # requests whose prompts took several steps


def same_tokens(live: Live, own: OwnServers) -> list[Fact]:
    """S2.4, on the given server, and under preemption and chunking on one with a pool that is too small."""
    jobs = small_jobs(live)
    facts = [equal_answers("S2.4 answers of this server", crowd(live, jobs).answers, one_by_one(live, jobs))]
    tight = own.tight()
    jobs = large_jobs(tight)
    found = crowd(tight, jobs)
    tight.request("POST", "/admin/reset-prefix-cache", admin=True).read()  # alone means computed anew, too
    facts.append(equal_answers("S2.4 answers of a small pool", found.answers, one_by_one(tight, jobs)))
    for what, count in (("preemptions", found.preemptions), ("prompts in several chunks", found.chunked)):
        facts.append(Fact(name=f"S2.4 {what} there", expected="1 or more", got=str(count), ok=count > 0))
    return facts


def equal_answers(name: str, among_others: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]) -> Fact:
    """How many are the same; an answer without tokens shows nothing."""
    same = sum(bool(one) and list(one) == list(other) for one, other in zip(among_others, alone, strict=True))
    tokens = sum(map(len, among_others))
    return Fact(
        name=f"{name} that are the same alone",
        expected=f"{len(alone)} of {len(alone)}",
        got=f"{same} of {len(alone)}, {tokens:,} tokens",
        ok=same == len(alone) > 0,
    )


def small_jobs(live: Live) -> list[Job]:
    """Few tokens: the given server may be slow."""
    return _draw(live, prompts=(8, 96), answers=(8, 32))


def large_jobs(live: Live) -> list[Job]:
    """Four of them outgrow the tight server's pool while they are computed."""
    return _draw(live, prompts=(200, 320), answers=(80, 150))


def crowd(live: Live, jobs: Sequence[Job]) -> Crowd:
    """All at once."""
    begin, preempted = live.last_step(), live.gain("quire_preemptions_total")
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = list(pool.map(lambda job: _answer(live, job), jobs))
    live.until_idle()
    slices: dict[str, set[int]] = {}
    for step in recorded(live, begin).steps:
        for request, _, start, count in step["slices"]:
            if count > 1:
                slices.setdefault(request, set()).add(start)
    return Crowd(
        answers=answers,
        preemptions=int(preempted()),
        chunked=sum(len(starts) > 1 for starts in slices.values()),
    )


def one_by_one(live: Live, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
    """Each when nothing else runs."""
    return [_answer(live, job) for job in jobs]


def _answer(live: Live, job: Job) -> tuple[int, ...]:
    reply = live.complete(job.prompt, job.num_tokens, return_token_ids=True)
    return tuple(reply["choices"][0]["token_ids"] or ())


def _draw(live: Live, *, prompts: tuple[int, int], answers: tuple[int, int]) -> list[Job]:
    dice = random.Random(_SEED)
    return [
        Job(prompt=tuple(live.prompt(dice.randint(*prompts))), num_tokens=dice.randint(*answers))
        for _ in range(_REQUESTS)
    ]

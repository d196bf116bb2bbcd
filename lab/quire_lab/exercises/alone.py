"""Exercise S2.4: what requests get among others they get alone, token for token.

Promises: lengths are drawn by a fixed seed, prompts are new to the server; every answer is asked for a second time when
nothing else runs. Requests to a small pool arrive in one pause, in order, and nothing tells the server how long they
will be, so that it preempts some of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire_lab.exercises.own import OwnServers
from quire_lab.exercises.paced import paused
from quire_lab.facts.fact import Fact, not_shown
from quire_lab.facts.live import Live
from quire_lab.facts.logs import recorded

_REQUESTS = 10
_SEED = 24
STOP = 63  # a token id that every vocabulary has
FORGOTTEN = 64  # short answers that a server has to see before it forgets all longer ones
_LARGE_PROMPT, LARGE_ANSWER = 160, 150
_AT_ONCE = 8  # short answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request with exact lengths; `options`: further fields of its body."""

    prompt: tuple[int, ...]
    num_tokens: int
    options: Mapping[str, object] = field(default_factory=dict)

    def ask(self, live: Live) -> dict[str, Any]:
        """Send the request and return the whole reply. Raises BenchError."""
        return live.complete(self.prompt, self.num_tokens, return_token_ids=True, **self.options)


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
    found = outgrowing(tight, jobs)
    tight.request("POST", "/admin/reset-prefix-cache", admin=True).read()  # alone means computed anew, too
    facts.append(equal_answers("S2.4 answers of a small pool", found.answers, one_by_one(tight, jobs)))
    return [*facts, happened("preemptions", found.preemptions), happened("prompts in several chunks", found.chunked)]


def happened(what: str, count: int) -> Fact:
    """Whether the answers of the small pool were compared under these circumstances; else they show less."""
    name = f"S2.4 {what} there"
    if not count:
        return not_shown(name, "none: what follows from them was not compared")
    return Fact(name=name, expected="1 or more", got=str(count), ok=True)


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
    dice = random.Random(_SEED)
    return [
        Job(prompt=tuple(live.prompt(dice.randint(8, 96))), num_tokens=dice.randint(8, 32)) for _ in range(_REQUESTS)
    ]


def large_jobs(live: Live) -> list[Job]:
    """Four of them enter the tight server and outgrow its pool while they are computed.

    Each could end at any token by a stop token, and never does, since a bias forbids it: the server cannot know that.
    """
    options = {"stop_token_ids": [STOP], "logit_bias": {str(STOP): -100}}
    return [
        Job(prompt=tuple(live.prompt(_LARGE_PROMPT)), num_tokens=LARGE_ANSWER, options=options)
        for _ in range(_REQUESTS)
    ]


def expect_short(live: Live) -> None:
    """Let so many answers end at their first token that the server expects the same of all with this `max_tokens`."""
    options = {"stop_token_ids": [STOP], "logit_bias": {str(STOP): 100}}
    for _ in range(FORGOTTEN // _AT_ONCE):
        short = Job(prompt=tuple(live.prompt(4)), num_tokens=LARGE_ANSWER, options=options)
        live.together([partial(short.ask, live)] * _AT_ONCE)


def crowd(live: Live, jobs: Sequence[Job]) -> Crowd:
    """All at once."""
    begin, preempted = live.last_step(), live.gain("quire_preemptions_total")
    with ThreadPoolExecutor(len(jobs)) as pool:
        replies = list(pool.map(lambda job: job.ask(live), jobs))
    live.until_idle()
    return _crowd(live, begin, replies, int(preempted()))


def outgrowing(live: Live, jobs: Sequence[Job]) -> Crowd:
    """All at once, in order, at a paced server that expects short answers of them."""
    expect_short(live)
    live.until_idle()
    begin, preempted = live.last_step(), live.gain("quire_preemptions_total")
    with paused(live, len(jobs)) as pause:
        for job in jobs:
            pause.send(partial(job.ask, live))
        replies = pause.replies()
    return _crowd(live, begin, replies, int(preempted()))


def _crowd(live: Live, begin: int, replies: Sequence[dict[str, Any]], preemptions: int) -> Crowd:
    slices: dict[str, set[int]] = {}
    for step in recorded(live, begin).steps:
        for request, _, start, count in step["slices"]:
            if count > 1:
                slices.setdefault(request, set()).add(start)
    return Crowd(
        answers=[_tokens(reply) for reply in replies],
        preemptions=preemptions,
        chunked=sum(len(starts) > 1 for starts in slices.values()),
    )


def one_by_one(live: Live, jobs: Sequence[Job]) -> list[tuple[int, ...]]:
    """Each when nothing else runs."""
    return [_tokens(job.ask(live)) for job in jobs]


def _tokens(reply: dict[str, Any]) -> tuple[int, ...]:
    return tuple(reply["choices"][0]["token_ids"] or ())

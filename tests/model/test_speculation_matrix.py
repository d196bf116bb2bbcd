"""Drafts change no answer, at length: every kind of weights and cache, by every drafter, in every situation.

Thousands of answers of the embedded model, tokens, log-probabilities and ends, against those of an engine without
drafts that serves one request after the other. Some of the requests have grammars, penalties, limits of thinking,
banned words. Minutes on two cores: `make draft-test`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from model.test_speculation import Results, Script, requests
from quire_engine.build import BuiltEngine, build, resolve
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.drafts import Drafter
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest
from quire_engine.demo import demo_model_path
from quire_engine.execution.drafting.outputs import OutputsDrafter
from quire_engine.execution.drafting.suffix import SuffixDrafter
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import Speculation
from support.offline import Generated, generate

pytestmark = pytest.mark.drafts

COUNT = 24  # requests of a cell, one of which has two choices
COMPUTED: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
# By situation: sequences at once, blocks of the pool, tokens of a prompt in a step, threads.
SITUATIONS: dict[str, tuple[int, int, int, int]] = {
    "one stream": (2, 400, 48, 1),
    "eight streams": (8, 400, 48, 1),
    "32 streams": (32, 800, 48, 1),
    "tiny pool": (8, 24, 48, 1),
    "chunks": (8, 400, 5, 1),
    "prefix hits": (8, 400, 48, 1),
    "swap": (8, 24, 48, 1),
    "resumed": (8, 400, 48, 1),
    "two threads": (8, 400, 48, 2),
}
DRAFTERS = ("suffix", "outputs", "model", "right", "wrong", "random", "outside")


def drafter(kind: str, expected: Results) -> Drafter | None:
    """None: the engine's own."""
    made: dict[str, Callable[[], Drafter]] = {"suffix": SuffixDrafter, "outputs": OutputsDrafter}
    if kind in {"off", "model"}:
        return None
    return made[kind]() if kind in made else Script(kind, wholes(expected))


def wholes(expected: Results) -> dict[tuple[int, ...], tuple[int, ...]]:
    prompts = {wanted.request_id: wanted.prompt_token_ids for wanted in requests(COUNT)}
    said = [(*prompts[name], *each.token_ids) for (name, _), each in expected.items()]
    return {whole: whole for whole in said}


def engine(computed: str, situation: str, kind: str, expected: Results) -> BuiltEngine:
    """A draft model is the same model, so it is often right; its calls seem to take no time, so it is asked."""
    streams, blocks, chunk, threads = SITUATIONS[situation]
    asked = EngineConfig(
        model=str(demo_model_path()),
        device="cpu",
        num_threads=threads,
        packed_cache=False,
        max_model_len=256,
        speculation=f"model:{demo_model_path()}" if kind == "model" else "off",
        limits=SchedulerLimits(
            max_num_seqs=streams, max_num_batched_tokens=64, prefill_chunk=chunk, min_chunk=min(chunk, 16),
            admission="prompt",
        ),
        **({"swap_space": 8 << 20, "swap_on_cpu": True} if situation == "swap" else {}),
        **COMPUTED[computed],
    )  # fmt: skip
    built = build(replace(asked, kv_memory=blocks * resolve(asked).bytes_per_block))
    # Copies cost nothing, so that whoever can be swapped is.
    plan = replace(built.plan.scheduler, swap_seconds=0.0) if situation == "swap" else built.plan.scheduler
    own = built.scheduler._speculation
    guesses = drafter(kind, expected) if own is None else own._drafter
    scheduler = Scheduler(plan, speculate=guesses and partial(Speculation, guesses))
    if scheduler._speculation is not None:
        scheduler._speculation._clock = lambda: 0.0
    return replace(built, scheduler=scheduler)


@cache
def without(computed: str) -> Results:
    built = engine(computed, "one stream", "off", {})
    found: Results = {}
    for wanted in requests(COUNT):
        found |= generate(built, [wanted])
    return found


def cut(expected: Results) -> tuple[list[GenerationRequest], Results]:
    """The requests as they come back after a crash, each at a random token, and what is left of their answers."""
    dice, resumed = random.Random(1), []
    left: Results = {}
    for wanted in requests(COUNT):
        sent = [expected[wanted.request_id, choice] for choice in range(wanted.n)]
        counts = [dice.randrange(len(each.token_ids)) for each in sent]
        told = tuple(tuple(each.token_ids[:count]) for each, count in zip(sent, counts, strict=True))
        resumed.append(replace(wanted, resumed_token_ids=told))
        for choice, (each, count) in enumerate(zip(sent, counts, strict=True)):
            rest = each.token_ids[count:], each.logprobs[count:]
            left[wanted.request_id, choice] = Generated(*rest, finish=each.finish, error=each.error)
    return resumed, left


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("computed", COMPUTED)
def test_answers_are_those_without_drafts(computed: str, situation: str, kind: str) -> None:
    expected = without(computed)
    built = engine(computed, situation, kind, expected)
    asked, answers = cut(expected) if situation == "resumed" else (requests(COUNT), expected)
    for _ in range(2 if situation == "prefix hits" else 1):
        assert generate(built, asked) == answers
    stats = built.scheduler.stats()
    assert stats.total_draft_tokens > 0
    assert stats.blocks_used == 0
    if situation in {"tiny pool", "swap"}:
        assert stats.total_preemptions > 0
    if situation == "swap":
        assert stats.total_preemptions_by_mode["swap"] > 0
    if situation == "prefix hits":
        assert stats.total_prefix_hit_tokens > 0
    if kind in {"right", "model"}:
        assert stats.total_accepted_tokens > 50

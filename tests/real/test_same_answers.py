"""Trained weights in every form: near transformers' numbers in float32, and the same bits however they are served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from quire_engine.build import BuiltEngine
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams, TokenLogprobs
from quire_server.checkpoint.trained import TRAINED
from real.conftest import RealModel
from real.forms import FORMS, built_as, rescheduled, short_of_blocks
from real.recorded import recorded
from support.offline import Generated, generate

TOKENS = 16
# How far the mean log-probability of the prose may be from that in float32, and a token's own on average.
FAR = {"stored": (0.01, 0.03), "bf16": (0.01, 0.03), "int8": (0.1, 0.3), "int4": (0.6, 0.9)}

# By how much the log-probability of a token must be ahead of the next one, so that it is the most likely here, too.
CLEAR = {"stored": 0.15, "bf16": 0.15, "int8": 1.0, "int4": 3.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in a form, and what its requests get one after the other, each in one piece."""

    name: str
    form: str
    built: BuiltEngine
    requests: list[GenerationRequest]
    expected: dict[tuple[str, int], Generated]


def requests_of(ids: tuple[int, ...]) -> list[GenerationRequest]:
    """Greedy and drawn continuations of the prose; three prompts share a beginning, two repeat themselves."""
    again = ids[1:60] + ids[1:60] + ids[1:12]
    asked: list[tuple[tuple[int, ...], dict[str, object], int]] = [
        (ids[:120], {}, 1),
        (ids[:100] + ids[200:230], {"temperature": 0.8, "seed": 1}, 1),
        (ids[:100], {"temperature": 1.0, "seed": 2, "top_p": 0.9}, 2),
        (again, {}, 1),
        (again[20:], {"temperature": 0.6, "seed": 3}, 1),
        (ids[150:280], {"repetition_penalty": 1.1, "presence_penalty": 0.3}, 1),
        (ids[:9], {"temperature": 1.2, "seed": 4, "top_k": 40}, 1),
    ]
    return [
        GenerationRequest(
            request_id=f"r{number}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(**{"temperature": 0.0, "num_logprobs": 2} | fields),
            stop=StopParams(max_new_tokens=TOKENS),
            n=n,
        )
        for number, (prompt, fields, n) in enumerate(asked)
    ]


@pytest.fixture(scope="module", params=[(name, form) for name in TRAINED for form in FORMS], ids="-".join)
def case(request: pytest.FixtureRequest, unfolded_model: RealModel, packed: Path) -> Case:
    name, form = request.param
    built = built_as(form, unfolded_model(name), packed)
    requests = requests_of(tuple(recorded(name).token_ids))
    expected = {}
    for each in requests:
        expected |= generate(rescheduled(built), [each])
    return Case(name=name, form=form, built=built, requests=requests, expected=expected)


def scores(case: Case, ids: list[int]) -> list[TokenLogprobs]:
    """Each token but the first, given those before it."""
    prompt = GenerationRequest(
        request_id="scored",
        prompt_token_ids=tuple(ids),
        sampling=SamplingParams(temperature=0.0, num_prompt_logprobs=1),
        stop=StopParams(max_new_tokens=1),
    )
    told = generate(rescheduled(case.built), [prompt])["scored", 0].prompt_logprobs
    assert told is not None
    return [each for each in told if each is not None]


def test_log_probabilities_are_near_those_in_float32(case: Case) -> None:
    wanted = recorded(case.name)
    found = scores(case, wanted.token_ids)
    apart = [ours.logprob - theirs for ours, theirs in zip(found, wanted.logprobs, strict=True)]
    mean, each = sum(apart) / len(apart), sum(map(abs, apart)) / len(apart)
    print(f"{case.name} {case.form}: mean {mean:+.4f}, each {each:.4f}, most {max(map(abs, apart)):.3f}")
    most, most_each = FAR[case.form]
    assert abs(mean) < most
    assert each < most_each


def test_greedy_tokens_are_those_in_float32(case: Case) -> None:
    """Given the tokens before, wherever two are not nearly as likely: rounding may choose between those."""
    ranks: list[int] = []
    for answer in recorded(case.name).greedy:
        found = scores(case, answer.prompt + answer.tokens)[len(answer.prompt) - 1 :]
        clear = [gap > CLEAR[case.form] for gap in answer.gaps]
        ranks += [each.rank for each, is_clear in zip(found, clear, strict=True) if is_clear]
    print(f"{case.name} {case.form}: {len(ranks)} clear tokens, {ranks.count(1)} chosen")
    assert len(ranks) > 15
    assert ranks.count(1) >= (0.9 if case.form == "int4" else 1.0) * len(ranks)


def test_the_requests_are_worth_comparing(case: Case) -> None:
    assert all(len(each.token_ids) == TOKENS for each in case.expected.values())
    assert len({tuple(each.token_ids) for each in case.expected.values()}) == len(case.expected)


def test_batched_equals_solo(case: Case) -> None:
    widest = 0

    def watch(batch: object) -> None:
        nonlocal widest
        widest = max(widest, len(batch.items))  # type: ignore[attr-defined]

    assert generate(rescheduled(case.built), case.requests, on_batch=watch) == case.expected
    assert widest > len(case.requests) // 2


def test_chunked_equals_solo(case: Case) -> None:
    built = rescheduled(case.built, prefill_chunk=23, min_chunk=3)
    assert generate(built, case.requests) == case.expected


def test_prefix_hits_equal_solo(case: Case) -> None:
    built = rescheduled(case.built)
    for _ in range(2):
        found = generate(built, case.requests)
        assert found == case.expected
    assert sum(each.num_cached_tokens >= 64 for each in found.values()) >= 5


def test_preempted_equals_solo(case: Case) -> None:
    found = generate(short_of_blocks(case.built, case.requests), case.requests)
    assert found == case.expected
    assert sum(each.num_preemptions for each in found.values()) > 0


def test_resumed_equals_solo(case: Case) -> None:
    """After a crash the tokens already sent come back as a part of the request; the rest follow as before."""
    half = TOKENS // 2
    resumed = [
        replace(
            request,
            resumed_token_ids=tuple(
                tuple(case.expected[request.request_id, choice].token_ids[:half]) for choice in range(request.n)
            ),
        )
        for request in case.requests
    ]
    rest = {
        key: Generated(token_ids=each.token_ids[half:], logprobs=each.logprobs[half:], finish=each.finish)
        for key, each in case.expected.items()
    }
    assert generate(rescheduled(case.built), resumed) == rest


def test_speculated_equals_solo(case: Case) -> None:
    built = rescheduled(case.built, speculates=True)
    assert generate(built, case.requests) == case.expected
    assert built.scheduler.stats().total_accepted_tokens > 3

"""What is refused because its like has taken the engine down: which requests are alike, for how long, how many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_engine.contract.types import BeamParams, GenerationRequest, SamplingParams, StopParams
from quire_server.engine.recovery import Quarantine, fingerprint

BAD = GenerationRequest(
    request_id="a",
    prompt_token_ids=(1, 2, 3),
    sampling=SamplingParams(temperature=0.5, seed=7),
    stop=StopParams(max_new_tokens=8),
    cache_salt="salt",
)


def test_nothing_is_refused_before_something_was_added() -> None:
    quarantine = Quarantine()
    assert quarantine.refusal(BAD, 0.0) is None
    quarantine.add(BAD, 0.0)
    assert quarantine.refusal(BAD, 1.0) == 599.0


@pytest.mark.parametrize(
    "same",
    [
        {"request_id": "b"},
        {"sampling": SamplingParams(temperature=0.5, seed=8)},
        {"arrival_time": 3.0, "deadline": 9.0},
        {"stop": StopParams(max_new_tokens=9)},
        {"resumed_token_ids": ((4,),)},
        {"tenant": "t", "priority": 3},
    ],
    ids=lambda same: next(iter(same)),
)
def test_it_is_the_same_whoever_sends_it_whenever(same: dict[str, object]) -> None:
    assert fingerprint(replace(BAD, **same)) == fingerprint(BAD)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        {"prompt_token_ids": (1, 2, 4)},
        {"prompt_token_ids": (1, 2)},
        {"sampling": SamplingParams(temperature=0.6, seed=7)},
        {"cache_salt": ""},
        {"n": 2},
        {"pooling": "last"},
        {"beam": BeamParams(width=2)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_the_engine_computes_tells_requests_apart(other: dict[str, object]) -> None:
    assert fingerprint(replace(BAD, **other)) != fingerprint(BAD)  # type: ignore[arg-type]


def test_its_time_ends_and_asking_does_not_prolong_it() -> None:
    quarantine = Quarantine(seconds=10.0)
    quarantine.add(BAD, 0.0)
    for now in range(10):
        assert quarantine.refusal(BAD, float(now)) == 10.0 - now
    assert quarantine.refusal(BAD, 10.0) is None
    assert len(quarantine) == 0


def test_the_number_is_bounded_and_what_is_asked_for_stays() -> None:
    quarantine = Quarantine(most=3)
    requests = [replace(BAD, prompt_token_ids=(i,)) for i in range(5)]
    for one in requests[:3]:
        quarantine.add(one, 0.0)
    assert quarantine.refusal(requests[0], 1.0) is not None
    for one in requests[3:]:
        quarantine.add(one, 1.0)
    assert len(quarantine) == 3
    assert [quarantine.refusal(one, 2.0) is not None for one in requests] == [True, False, False, True, True]

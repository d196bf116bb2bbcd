"""The limits' rules, and their arithmetic against brute force."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.contract.errors import ConfigError, InfeasibleRequest
from quire_engine.contract.limits import LIMIT_NAMES, LeastShares, SchedulerConfig, SchedulerLimits, scheduler_limits
from quire_engine.contract.types import GenerationRequest
from quire_engine.scheduling.gate import check_request
from support.fake_executor import request
from support.limits import scheduler_config

LIMITS = SchedulerLimits()


def test_work_and_bound() -> None:
    work = LIMITS.work(num_prompt=100, max_new_tokens=20, n=3)
    assert work == 10 + 20
    assert LIMITS.wait_bound(work, earlier_work=7) == 64 + 3 * 30 + 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_num_batched_tokens": 79}, "set max_num_batched_tokens to 80 or more, or max_num_seqs to 63 or less"),
        ({"max_num_batched_tokens": 16}, "set max_num_batched_tokens to 80 or more$"),
        (
            {"min_chunk": 600, "max_num_batched_tokens": 1000},
            "set prefill_chunk to 600 or more",
        ),
        ({"itl_target": -1.0}, "itl_target is -1.0, must be at least 0"),
        ({"itl_target": float("nan")}, "itl_target is nan, must be at least 0"),
        ({"itl_target": float("inf")}, "itl_target is inf"),
        ({"num_blocks": 0}, "num_blocks is 0, must be at least 1"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_bypasses": -1}, "max_bypasses is -1, must be at least 0"),
        ({"elder_age_steps": -1}, "elder_age_steps is -1"),
        *(
            ({name: 0}, f"{name} is 0, must be at least 1")
            for name in (
                "block_size",
                "max_num_seqs",
                "max_num_batched_tokens",
                "prefill_chunk",
                "max_num_partial_prefills",
                "min_chunk",
            )
        ),
    ],
)
def test_impossible_limits_are_refused(change: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scheduler_config(**{"num_blocks": 60, **change}).check()


@pytest.mark.parametrize(
    ("given", "interactive", "batch"),
    [
        ("interactive=0.7,batch=0.1", 0.7, 0.1),
        (" batch = 0.25 ", 0.0, 0.25),
        ("interactive=1,batch=0", 1.0, 0.0),
        ({"interactive": 0.6, "batch": 0.4}, 0.6, 0.4),
        (LeastShares(batch=0.2), 0.0, 0.2),
    ],
)
def test_shares_of_classes_are_read(given: object, interactive: float, batch: float) -> None:
    shares = LeastShares.parse(given)
    assert shares == LeastShares(interactive=interactive, batch=batch) == LeastShares.parse(str(shares))
    assert shares.problem is None
    limits = dataclasses.replace(LIMITS, class_share=shares)
    assert scheduler_limits(dataclasses.asdict(limits)) == limits


@pytest.mark.parametrize("given", ["", "0.7", "interactive", "chat=0.7", "batch=much", "batch=0.1,batch=0.2", 0.7, {}])
def test_shares_of_another_form_are_refused_with_the_right_one(given: object) -> None:
    with pytest.raises(
        ConfigError, match=r"expected interactive=SHARE,batch=SHARE, such as interactive=0\.7,batch=0\.1"
    ):
        LeastShares.parse(given)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ("interactive=1.5", "share interactive=1.5 must be 0 to 1"),
        ("interactive=nan", "share interactive=nan must be 0 to 1"),
        ("batch=-0.1", "share batch=-0.1 must be 0 to 1"),
        ("batch=0.6", "share batch=0.6 must be at most 0.5"),
        ("interactive=0.8,batch=0.4", "the shares add up to 1.2, must be at most 1"),
    ],
)
def test_impossible_shares_are_refused(shares: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        scheduler_config(num_blocks=60, class_share=LeastShares.parse(shares)).check()


def test_the_smallest_sufficient_budget_is_accepted() -> None:
    SchedulerLimits(max_num_batched_tokens=80).check()
    SchedulerLimits(max_num_batched_tokens=79, max_num_seqs=63).check()


def test_zero_is_accepted_where_it_means_something() -> None:
    SchedulerLimits(itl_target=0.0, max_bypasses=0, elder_age_steps=0).check()


def test_every_number_has_a_least_value() -> None:
    for name in LIMIT_NAMES:
        if isinstance(getattr(LIMITS, name), bool) or not isinstance(getattr(LIMITS, name), int | float):
            continue
        with pytest.raises(ConfigError, match=f"{name} is -1"):
            dataclasses.replace(LIMITS, **{name: -1}).check()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "blocks"),
    [
        (200, 8, 1, 13),
        (200, 8, 4, 16),
        (200, 9, 4, 16),
        (200, 10, 4, 20),
        (200, 1, 16, 13),
        (16, 0, 4, 1),
        (16, 2, 4, 5),
    ],
)
def test_footprint(prompt: int, max_tokens: int, n: int, blocks: int) -> None:
    assert LIMITS.footprint(num_prompt=prompt, max_new_tokens=max_tokens, n=n) == blocks


def test_the_largest_max_tokens_is_the_largest() -> None:
    for block_size in (1, 3, 4):
        config = scheduler_config(num_blocks=7, block_size=block_size, max_model_len=25)
        for prompt in range(1, 30):
            for n in (1, 2, 3):
                feasible = [tokens for tokens in range(40) if accepted(config, request("r", prompt, tokens, n=n))]
                assert config.largest_max_tokens(num_prompt=prompt, n=n) == max(feasible, default=-1)


def accepted(config: SchedulerConfig, wanted: GenerationRequest) -> bool:
    try:
        check_request(config, wanted)
    except InfeasibleRequest:
        return False
    return True


def test_a_choice_needs_a_slot_and_a_part_of_the_first_claim() -> None:
    assert SchedulerLimits(max_num_seqs=8, min_chunk=16).max_choices == 8
    assert SchedulerLimits(max_num_seqs=64, min_chunk=16).max_choices == 16

"""Swaps to a host pool: the scheduler's machine and its runs one step ahead, with host blocks for victims and prefixes.

What is checked is what is checked without them: a choice's tokens are those that it has alone, read from slots that
hold what was computed for them (I14), within the printed bound.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from property.test_scheduler_ahead import Ahead
from property.test_scheduler_machine import SchedulerMachine
from quire_engine.contract.batch import Batch, StepResult
from quire_engine.contract.invariants import InvariantViolation
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.scheduling.cache_shares import Owner
from quire_engine.scheduling.swapping import HostTier, SwappingAllocator
from support.fake_executor import CorruptKV, FakeExecutor
from support.planted import show_a_fault
from support.scheduler_model import configs
from support.seeds import naming

NUM_EXAMPLES, NUM_RUNS = 14, 100  # `make schedule-test` does many times as many
FIRST_SEED = 120  # from where on few runs have seen all that is asked for below


def swapping(config: SchedulerConfig, num_host_blocks: int, seconds: float) -> SchedulerConfig:
    num_blocks = config.num_blocks // len(config.windows)  # there is one group of layers where blocks are swapped
    return dataclasses.replace(
        config, num_blocks=num_blocks, windows=(None,), num_host_blocks=num_host_blocks, swap_seconds=seconds
    )


class SwappingMachine(SchedulerMachine):
    """The scheduler's machine; a copy costs nothing, or as much as a few of its tokens of a second each."""

    @initialize(config=configs(), num_host_blocks=st.integers(1, 24), seconds=st.sampled_from([0.0, 0.0, 0.05]))
    def start(self, config: SchedulerConfig, num_host_blocks: int, seconds: float) -> None:
        super().start(swapping(config, num_host_blocks, seconds))

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "run"):
            assert self.run.scheduler.stats().host_blocks_used == 0  # I15


SwappingMachine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestSwapping = SwappingMachine.TestCase


class AheadWithSwaps(Ahead):
    """A run with a step in flight while victims of the next one are swapped out, or one without."""

    def draw_config(self) -> SchedulerConfig:
        config, dice = super().draw_config(), self.dice
        return swapping(config, dice.randint(1, 24), dice.choice([0.0, 0.0, 0.0, 0.05]))

    def check_end(self) -> None:
        super().check_end()
        stats = self.run.scheduler.stats()
        assert stats.host_blocks_used == 0
        assert stats.host_blocks_used + stats.host_blocks_cached <= stats.host_blocks_total
        assert sum(stats.total_preemptions_by_mode.values()) == stats.total_preemptions
        for mode, count in stats.total_preemptions_by_mode.items():
            self.seen[mode] += count
        self.seen["out"] += stats.total_swapped_out_blocks
        self.seen["in"] += stats.total_swapped_in_blocks


def play(seed: int, executor: Callable[[int], FakeExecutor] | None = None) -> Counter[str]:
    run = AheadWithSwaps(seed, executor)
    with naming(seed):
        run.play()
    return run.seen


def test_random_swaps_one_step_ahead_give_the_tokens_of_solo_runs(request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + num_runs):
        seen += play(seed)
    print(dict(seen))
    assert all(seen[what] > num_runs / 10 for what in ("swap", "recompute", "out", "in", "copies", "forks")), seen


def test_choices_may_end_in_two_results_between_two_plans() -> None:
    """The step log then meets the end of the second with the request already finished."""
    play(35608)


class SwapsInFirst(FakeExecutor):
    """A planted fault: blocks come in before others have gone out."""

    def copy(self, batch: Batch) -> None:
        super().copy(dataclasses.replace(batch, swap_out=(), copies=()))
        super().copy(dataclasses.replace(batch, swap_in=()))


class SwapsLate(FakeExecutor):
    """A planted fault: blocks go out after the step that reuses them has written."""

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(dataclasses.replace(batch, swap_out=()))
        self.copy(dataclasses.replace(batch, swap_in=(), copies=()))
        return result


class WrongBlock(FakeExecutor):
    """A planted fault: of two blocks that come in, each gets the other's content."""

    def copy(self, batch: Batch) -> None:
        sources, targets = [source for source, _ in batch.swap_in], [target for _, target in batch.swap_in]
        super().copy(dataclasses.replace(batch, swap_in=tuple(zip(reversed(sources), targets, strict=True))))


@pytest.mark.parametrize("executor", [SwapsInFirst, SwapsLate, WrongBlock])
def test_a_fault_of_the_executor_is_found(executor: type[FakeExecutor]) -> None:
    def play_with_it(seed: int) -> None:
        play(seed, lambda size: executor(size, max_in_flight=2))

    show_a_fault(play_with_it, 400, as_one_of=(CorruptKV, AssertionError, KeyError))


def _forget_tail(patch: pytest.MonkeyPatch) -> None:
    """The last block, which is not full, is not copied out."""
    save = HostTier.save

    def careless(self: HostTier, key: bytes, block: int, *owner: Owner[int] | None) -> None:
        if len(key) == 32:  # a hash
            save(self, key, block, *owner)
        else:
            self.pool.store(key)

    patch.setattr(HostTier, "save", careless)


def _release_early(patch: pytest.MonkeyPatch) -> None:
    """Host blocks are free for others while a copy of this step is still to read them."""

    def careless(self: HostTier, keys: list[bytes]) -> None:
        for key in keys:
            self.pool.drop(key, keep=True)

    patch.setattr(HostTier, "hold", careless)
    patch.setattr(HostTier, "bring", lambda self, key, block: self._arriving.update({block: key}))


def _keep_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Tokens are kept whose results were not taken in."""
    swap_out = SwappingAllocator.swap_out

    def hasty(self: SwappingAllocator, kept: list, copied_from: dict) -> bool:
        more = [(s, max(tokens, min(s.kv.num_computed, len(s.token_ids) - 1))) for s, tokens in kept]
        return swap_out(self, more, copied_from)

    patch.setattr(SwappingAllocator, "swap_out", hasty)


@pytest.mark.parametrize(("plant", "since"), [(_forget_tail, 0), (_release_early, 0), (_keep_what_is_in_flight, 375)])
def test_a_fault_of_the_scheduler_is_found(
    plant: Callable[..., None], since: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    show_a_fault(play, 1000, as_one_of=(CorruptKV, AssertionError, KeyError, InvariantViolation), since=since)

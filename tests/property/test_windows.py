"""Groups of layers whose windows give blocks back, under random schedules that are planned one step ahead.

The executor pretends a pool in which every slot of every group remembers what was written to it: a row that sees a
block that was given back, or another group's, fails the test.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from property.test_scheduler_ahead import Ahead
from quire_engine.contract.kv_groups import KVGroup
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import TokenOutput
from quire_engine.scheduling.blocks import PageTable
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import CorruptKV, FakeExecutor, Run, expected_tokens, request
from support.limits import scheduler_config
from support.seeds import naming

NUM_RUNS = 66  # `make property-test` does many times as many
WINDOWS = ((None, 3), (None, 6, 6), (4,), (9, 2), (None, None, 5))


class Windowed(Ahead):
    """One run with a few groups of layers."""

    def draw_config(self) -> SchedulerConfig:
        config, windows = super().draw_config(), self.dice.choice(WINDOWS)
        return replace(config, num_blocks=config.num_blocks * len(windows), windows=windows)

    def take(self, outputs: list[TokenOutput]) -> None:
        super().take(outputs)
        for sequence in self.run.scheduler._roster.sequences.values():
            passed = [table.num_passed for table in sequence.kv.tables]
            self.seen["given back"] += max(passed) > 0
            self.seen["a hit behind the window"] += any(
                0 < table.num_passed == table.first_seen(sequence.kv.num_computed) < len(table)
                and sequence.group.num_cached_tokens > 0
                for table in sequence.kv.tables
            )


def test_random_schedules_read_only_what_their_windows_have(request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    for seed in range(num_runs):
        windowed = Windowed(seed)
        with naming(seed):
            windowed.play()
        seen += windowed.seen
    print(dict(seen))
    for what in ("ahead", "copies", "forks", "preempted", "held", "given back", "a hit behind the window"):
        assert seen[what] > num_runs / 10, seen


def test_a_block_given_back_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVGroup.first_seen
    monkeypatch.setattr(KVGroup, "first_seen", lambda group, tokens: honest(group, tokens + 1))
    found = 0
    for seed in range(200):
        try:
            Windowed(seed).play()
        except (CorruptKV, AssertionError):
            found += 1
        if found > 10:
            return
    pytest.fail(f"it was found {found} times")


def run_with(windows: tuple[int | None, ...], **limits: object) -> Run:
    config = scheduler_config(
        **{
            "num_blocks": 64,
            "block_size": 4,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "min_chunk": 4,
            "max_num_batched_tokens": 16,
            "prefill_chunk": 16,
            "windows": windows,
            "itl_target": 0.0,
            **limits,
        }
    )
    return Run(scheduler=Scheduler(config), executor=FakeExecutor(4, windows=windows))


def test_a_long_prompt_takes_no_more_of_a_window_than_it_sees() -> None:
    run = run_with((8,), num_blocks=8)
    wanted = request("long", 200, max_tokens=30)
    run.add(wanted)
    run.to_end()
    assert tuple(run.tokens["long", 0]) == expected_tokens(wanted, 0)
    assert run.scheduler.stats().blocks_used == 0
    assert run.scheduler.stats().total_preemptions == 0


def test_a_prefix_is_found_behind_its_window() -> None:
    run = run_with((None, 8))
    first = request("first", tuple(range(100)), max_tokens=4)
    run.add(first)
    run.to_end()
    second = request("second", (*range(96), 7, 7, 7), max_tokens=4)
    run.add(second)
    run.one_step()
    (group,) = run.scheduler._roster.running
    whole, windowed = group.leader.kv.tables
    assert group.num_cached_tokens == 96
    assert (whole.num_passed, windowed.num_passed) == (0, (99 - 8 + 1) // 4)
    assert set(windowed.block_ids[: windowed.num_passed]) == {0}
    run.to_end()
    assert tuple(run.tokens["second", 0]) == expected_tokens(second, 0)


def test_a_prefix_whose_window_was_evicted_is_a_shorter_one() -> None:
    run = run_with((None, 8), num_blocks=46)
    run.add(request("first", tuple(range(64)), max_tokens=1))
    run.to_end()
    kv = run.scheduler._kv
    windowed = kv._caches.each[1]._block_of
    evicted = windowed[next(reversed(windowed))]
    kv._pool.forget(evicted)
    kv._forget(evicted)
    second = request("second", (*range(60), 9, 9, 9, 9), max_tokens=4)
    run.add(second)
    run.to_end()
    assert tuple(run.tokens["second", 0]) == expected_tokens(second, 0)


@pytest.mark.parametrize("n", [1, 3])
def test_choices_share_their_windows(n: int) -> None:
    run = run_with((None, 6, 6), num_blocks=120)
    wanted = request("r", 30, max_tokens=40, n=n)
    run.add(wanted)
    run.to_end()
    for choice in range(n):
        assert tuple(run.tokens["r", choice]) == expected_tokens(wanted, choice)


def test_the_most_blocks_of_a_sequence_are_those_that_it_can_hold() -> None:
    """Counted position by position, on the way to every length in steps of every size."""
    dice = random.Random(5)
    for _ in range(300):
        window, at_once, size = dice.randint(1, 20), dice.randint(1, 12), dice.randint(1, 6)
        length = dice.randint(1, 60)
        table = PageTable(size, KVGroup(window, at_once))
        most = known = 0
        while known < length:
            end = min(length, known + dice.randint(1, at_once))
            table.extend([1] * (table.num_blocks_for(end) - len(table)))
            most, known = max(most, table.num_held), end
            table.give_back(max(table.first_seen(known), table.num_passed))
        assert most <= table.group.most_blocks(length, size)
        assert table.num_held <= table.group.settled_blocks(length, size)

"""Random traffic whose prefixes are kept and come back after a restart: every token right, and every log replays.

The executor raises where a sequence would read a slot that holds something else, so a block that was kept wrongly, or
placed wrongly, ends a run.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import pytest

from property.test_step_log_replay import Traffic, lines_of, plans, replayed
from quire_engine.contract.block_store import BlockStore
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import RESET_PREFIX_CACHE
from quire_engine.scheduling import kept_prefixes
from support.fake_store import FakeStore

NUM_RUNS = 4  # `make property-test` does many times as many


class KeptTraffic(Traffic):
    """Steps are not planned ahead, as on a CPU. `kept`: what an earlier run has kept."""

    def __init__(self, seed: int, kept: dict[bytes, bytes]) -> None:
        self.kept, self.seed = kept, seed
        super().__init__(seed)

    def draw_config(self) -> SchedulerConfig:
        config = super().draw_config()
        return dataclasses.replace(
            config,
            plans_ahead=False,
            num_host_blocks=0,
            limits=dataclasses.replace(config.limits, enable_prefix_caching=True),
        )

    def make_store(self) -> BlockStore:
        self.store = FakeStore(random.Random(self.seed), self.config.limits.block_size, self.kept)
        return self.store

    def clock(self) -> float:
        if getattr(self, "executor", None) is not None:
            self.store.executor = self.executor
            self.store.tick()
        return super().clock()

    def disturb(self, number: int) -> None:
        if number % 25 == 24:
            self.engine.control(RESET_PREFIX_CACHE, {})
            assert not self.kept
        super().disturb(number)


@pytest.fixture(autouse=True)
def _short_prompts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_prefixes, "LEAST_TOKENS", 9)


def test_runs_after_restarts_are_right_and_replay(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    for seed in range(num_runs):
        kept: dict[bytes, bytes] = {}
        for life in range(2):
            traffic = KeptTraffic(seed, kept)
            counts = traffic.store.counts
            stats = traffic.scheduler.stats()
            assert (stats.total_kept_read, stats.kept_blocks) == (counts.read, counts.blocks)
            seen += Counter({"written": counts.written, "dropped": counts.dropped, "refused": counts.refused})
            seen[f"read in life {life}"] += counts.read
            lines = lines_of(traffic.scheduler)
            seen["adopted"] += sum(line["kind"] == "adopt" for line in lines)
            scheduler, difference = replayed(lines, tmp_path)
            assert difference is None, (seed, life)
            assert plans(lines_of(scheduler)) == plans(lines)
    names = ("written", "dropped", "refused", "read in life 0", "read in life 1", "adopted")
    assert all(seen[what] > num_runs / 4 for what in names), seen


def test_a_log_without_what_was_adopted_does_not_replay(tmp_path: Path) -> None:
    def differs(seed: int) -> bool:
        kept: dict[bytes, bytes] = {}
        KeptTraffic(seed, kept)
        lines = lines_of(KeptTraffic(seed, kept).scheduler)
        return replayed([line for line in lines if line["kind"] != "adopt"], tmp_path)[1] is not None

    assert any(map(differs, range(12)))

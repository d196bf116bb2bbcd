"""Streams whose next tokens nobody can guess cost few searches, and none where no guess could pay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quire_engine.contract.drafts import NO_DRAFT, Draft, Wish
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import Speculation
from support.fake_executor import FakeExecutor, Run, request
from support.limits import scheduler_config

FLAT = dict.fromkeys((1, 64), 0.01)  # seconds of a step
STEEP = {rows: 1e-3 * rows for rows in (1, 64)}


class Silent:
    """Guesses nothing, and counts who asks."""

    is_costly = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        self.asked += [wish.sequence_id for wish in wishes]
        return [NO_DRAFT for _ in wishes]

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


def run(streams: int, row_seconds: dict[int, float]) -> tuple[Run, Silent, Speculation]:
    silent = Silent()
    config = scheduler_config(num_blocks=streams * 80, max_num_seqs=streams, max_num_batched_tokens=2048)
    scheduler = Scheduler(config, speculate=partial(Speculation, silent, row_seconds=row_seconds))
    found = Run(scheduler=scheduler, executor=FakeExecutor(config.limits.block_size), check=False)
    found.add(*(request(f"r{i}", prompt=4, max_tokens=400) for i in range(streams)))
    for _ in range(20):
        found.one_step()
    silent.asked.clear()
    assert scheduler._speculation is not None
    scheduler._speculation._costs = scheduler._speculation._costs.__class__(row_seconds)  # not what the fake takes
    scheduler._speculation.learn = lambda num_rows, num_decodes, seconds: None  # type: ignore[method-assign]
    return found, silent, scheduler._speculation


def test_silent_streams_are_searched_one_a_step_until_a_draft_is_right() -> None:
    found, silent, speculation = run(24, FLAT)
    for _ in range(5):
        found.one_step()
    assert len(silent.asked) == 5 * 4
    for _ in range(60):
        found.one_step()
    silent.asked.clear()
    for _ in range(24):
        found.one_step()
    assert sorted(silent.asked) == sorted(speculation._records), "each of them once"
    speculation.note(found.scheduler._roster.running[0].sequences[0], 2, 1)
    silent.asked.clear()
    found.one_step()
    assert len(silent.asked) == 1 + 4, "the one that was guessed right, and four of the others"


def test_nobody_is_searched_where_rows_cost_what_they_bring() -> None:
    found, silent, speculation = run(24, STEEP)
    counted = speculation.total_undrafted["batch"]
    for _ in range(5):
        found.one_step()
    assert not silent.asked
    assert speculation.total_undrafted["batch"] == counted + 5 * 24

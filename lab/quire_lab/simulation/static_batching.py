"""Static batching, as before continuous batching: a batch is filled, padded, and kept until its longest member ends.

Promises: the same load, cost model and slots as for the compared scheduler. A static server reserves whole slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire_bench.traces import TraceRow
from quire_lab.simulation.outcome import Outcome, Served
from quire_lab.simulation.setup import Setup


@dataclass(slots=True, kw_only=True)
class StaticOutcome:
    """A run in static batches."""

    outcome: Outcome
    batches: int = 0
    slot_steps: int = 0  # computed decode rows, padding included
    useful_steps: int = 0  # computed decode rows without padding

    @property
    def efficiency(self) -> float:
        """Useful over computed rows."""
        return self.useful_steps / max(1, self.slot_steps)


def simulate_static(setup: Setup, rows: Sequence[TraceRow], *, speed: float = 1.0) -> StaticOutcome:
    """Batches of at most `max_num_seqs` waiting requests in order of arrival; none joins a running batch."""
    made = StaticOutcome(outcome=Outcome(num_blocks=setup.scheduler.num_blocks))
    waiting = [Served(row=row, number=number, at=row.at / speed) for number, row in enumerate(rows)]
    made.outcome.requests = list(waiting)
    limits, now, first = setup.scheduler.limits, 0.0, 0
    while first < len(waiting):
        now = max(now, waiting[first].at)
        due = [one for one in waiting[first : first + limits.max_num_seqs] if one.at <= now]
        now = _run_batch(due, setup, made, now)
        first += len(due)
    made.outcome.seconds = now
    return made


def _run_batch(members: list[Served], setup: Setup, made: StaticOutcome, now: float) -> float:
    """One step for the prompts, padded to the longest; then a step for each token of the longest answer."""
    cost, outcome = setup.cost, made.outcome
    width = max(one.row.input_tokens for one in members)
    longest = max(one.row.output_tokens for one in members)
    blocks = len(members) * setup.scheduler.num_blocks_for(width + longest - 1)
    began = now
    for step in range(longest):
        now += (
            cost.prompt_seconds(width * len(members))
            if step == 0
            else cost.decode_seconds(len(members), len(members) * (width + step))
        )
        for one in members:
            if step < one.row.output_tokens:
                if step:
                    outcome.gaps.append(now - one.last_at)
                else:
                    one.first_at, one.queue_seconds = now, began - one.at
                one.last_at, one.num_tokens = now, step + 1
                one.ended_step = outcome.steps + step + 1
    if blocks > outcome.peak_blocks:
        outcome.peak_blocks, outcome.peak_step = blocks, outcome.steps
    outcome.steps += longest
    outcome.block_steps += blocks * longest
    outcome.cumulative_blocks += blocks
    outcome.busy_seconds += now - began
    outcome.computed_tokens += len(members) * (width + longest - 1)
    made.batches += 1
    made.slot_steps += len(members) * longest
    made.useful_steps += sum(one.row.output_tokens for one in members)
    return now

"""Loads given on the command line: output lengths and arrival steps, one prompt token each.

Promises: with steps of one second, an arrival at t is first computed in the step after the t-th, as in the reference
exercises. Must not know: the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_lab.simulation.setup import Setup


def rows_of(lengths: Sequence[int], arrivals: Sequence[float] = (), *, prompt_tokens: int = 1) -> tuple[TraceRow, ...]:
    """A request for each length; without arrivals all come at once. Raises ConfigError."""
    times = list(arrivals) or [0.0] * len(lengths)
    if len(times) != len(lengths):
        raise ConfigError(f"there are {len(lengths)} lengths and {len(times)} arrivals; give one for each")
    if min(lengths, default=0) < 1 or prompt_tokens < 1 or min(times) < 0 or times != sorted(times):
        raise ConfigError("lengths must be at least 1, arrivals at least 0 and in order")
    return tuple(
        TraceRow(at=at, input_tokens=prompt_tokens, output_tokens=length)
        for at, length in zip(times, lengths, strict=True)
    )


def exercise_setup(rows: Sequence[TraceRow]) -> Setup:
    """Blocks of 16 tokens, no prefix cache, memory for all requests: none waits or is preempted."""
    most = max(len(rows), 1)
    limits = SchedulerLimits(
        enable_prefix_caching=False, max_num_seqs=most, max_num_batched_tokens=512 + 16 * most, itl_target=0.0
    )
    longest = max(row.input_tokens + row.output_tokens for row in rows)
    blocks = sum(limits.num_blocks_for(row.input_tokens + row.output_tokens) for row in rows)
    scheduler = SchedulerConfig(num_blocks=blocks, max_model_len=longest, limits=limits)
    return replace(Setup(), scheduler=scheduler, max_num_queued_reqs=most)

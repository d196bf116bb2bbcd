"""What the dashboard is told of one second, and how the steps of a second become a few numbers.

Promises: plain values with short names, since hundreds are sent to who opens the page; a frame's size does not
depend on the load. Must not know: who looks, HTTP, how values are collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.types import EngineStats

MOST_BARS = 20  # of a second's timeline
# Prompt tokens, generated tokens, milliseconds and number of consecutive steps.
Bar = tuple[int, int, float, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """KV blocks, as of the last step but for `peak`."""

    total: int
    used: int
    peak: int  # most used after any step of the second
    cached: int
    shared: int  # of the used ones: held by two sequences or more
    unshared: int  # by one
    saved: int  # that there would be more without sharing
    waste: float  # share of the used blocks' token slots that hold no token
    static_longest: int  # that static batching would hold: for each sequence the longest of its batch
    static_full: int  # that slots of the longest context would hold
    host_used: int
    host_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """One tenant's part of what is running, waiting and served."""

    name: str
    running: int
    waiting: int
    service: float  # since the engine's start


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One second. Counts are those of the second, gauges those at its end, latencies of the last ten."""

    t: float  # seconds since the epoch
    steps: int
    prefill: int  # tokens computed
    decode: int
    generated: int
    busy: float  # share of the second that steps took
    step_ms: float  # longest step
    running: int
    waiting: dict[str, int]
    kv_waited: float  # seconds that the queue's head has waited for blocks, now
    blocks: Blocks
    ttft: tuple[float, float, float] | None  # p50, p95, p99 in seconds; None: nothing came
    itl: tuple[float, float, float] | None
    finished: int
    rejected: int
    failed: int
    preempted: int
    restarts: int
    in_system: float  # Little's law over the last minute
    arrivals: float
    seconds: float
    residual: float
    efficiency: float
    static_efficiency: float | None  # None: no batch has ended within the last minute
    tenants: tuple[TenantShare, ...]


def bars(steps: Sequence[EngineStats]) -> list[Bar]:
    """The steps in order, so many of them taken together that there are `MOST_BARS` at most."""
    size = max(1, -(-len(steps) // MOST_BARS))
    groups = [steps[start : start + size] for start in range(0, len(steps), size)]
    return [
        (
            sum(step.prefill_tokens for step in group),
            sum(step.decode_tokens for step in group),
            round(sum(step.step_seconds for step in group) * 1e3, 2),
            len(group),
        )
        for group in groups
    ]


def tenant_shares(stats: EngineStats) -> tuple[TenantShare, ...]:
    """What the engine says of tenants, where it knows any."""
    return tuple(
        TenantShare(name=each.tenant, running=each.running, waiting=each.waiting, service=round(each.total_service, 1))
        for each in stats.tenants
    )


def blocks(stats: EngineStats, *, peak: int, static_longest: int, static_full: int) -> Blocks:
    """The pool of one moment. What an engine does not tell is 0."""
    return Blocks(
        total=stats.blocks_total,
        used=stats.blocks_used,
        peak=max(peak, stats.blocks_used),
        cached=stats.blocks_cached,
        shared=stats.blocks_shared,
        unshared=stats.blocks_unshared,
        saved=stats.blocks_saved,
        waste=round(stats.slots_unused / stats.slots_allocated, 4) if stats.slots_allocated else 0.0,
        static_longest=static_longest,
        static_full=static_full,
        host_used=getattr(stats, "host_blocks_used", 0),
        host_total=getattr(stats, "host_blocks_total", 0),
    )

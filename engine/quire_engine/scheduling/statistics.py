"""What operators count of a scheduler's books.

Promises: gauges equal the state, counted anew or kept as it changes; nothing here takes time in proportion to the pool.
Must not know: steps, results, outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.planner import Planner
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Sequence
from quire_engine.types import WAIT_REASONS, EngineStats, WaitReason


def engine_stats(kv: KVAllocator, roster: Roster, planner: Planner) -> EngineStats:
    """Gauges of this moment and counters since the start; the tokens of the last step are the caller's."""
    waiting: dict[WaitReason, int] = dict.fromkeys(WAIT_REASONS, 0)
    for group in roster.waiting:
        waiting[group.wait_reason] += len(group.sequences)
    admission = planner.admission
    used = kv.num_blocks - kv.num_available
    return EngineStats(
        running=roster.num_running,
        waiting=waiting,
        held=sum(len(group.sequences) for group in roster.held.values()),
        blocks_total=kv.num_blocks,
        blocks_used=used,
        blocks_cached=kv.num_cached,
        blocks_free=kv.num_available - kv.num_cached,
        blocks_shared=kv.num_shared,
        blocks_unshared=used - kv.num_shared,
        blocks_saved=kv.num_saved,
        slots_allocated=used * kv.block_size,
        slots_unused=num_unused_slots([s for group in roster.running for s in group.sequences], kv.block_size),
        total_preemptions=roster.total_preemptions,
        total_preemptions_by_mode={"recompute": roster.total_preemptions, "swap": 0},
        total_prefix_query_tokens=admission.total_query_tokens,
        total_prefix_hit_tokens=admission.total_hit_tokens,
        total_kv_evictions=kv.total_evictions,
        total_blocks_taken=kv.total_taken,
        kv_waiting_since=admission.kv_waiting_since,
        total_kv_wait_seconds=admission.total_kv_wait_seconds,
        tenants=planner.accounts.stats(roster.running, roster.waiting),
        total_prefill_tokens_saved=admission.total_saved_tokens,
    )


def num_unused_slots(sequences: Iterable[Sequence], block_size: int) -> int:
    """Token slots in the sequences' blocks that hold no token; a shared block counts once."""
    unused, shared = 0, set[int]()
    for sequence in sequences:
        spare = sequence.table.num_slots - sequence.num_computed
        if sequence.shares_tail and spare:
            tail = sequence.table.block_ids[sequence.num_computed // block_size]
            if tail in shared:
                spare -= block_size - sequence.num_computed % block_size
            shared.add(tail)
        unused += spare
    return unused

"""One picture of the pool: each block, each page table, and the requests that wait.

Promises: a picture changes nothing, is made only when it is asked for, and has a bounded size. Must not know: policies.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from quire_engine.scheduling.cached_blocks import CachedBlocks
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Group, Sequence

MOST_BLOCKS = 4096  # in one picture; of a larger pool the first ones
MOST_TABLES = 64
MOST_WAITING = 64


def pool_view(kv: CachedBlocks, roster: Roster) -> dict[str, Any]:
    """The blocks that are cached, the page tables in the order of arrival, and the requests that wait.

    A block in no table and not among the cached ones is free. Tables are those of the first group of layers.
    """
    shown = min(kv.num_blocks, MOST_BLOCKS)
    seated = (sequence for sequence in roster.sequences.values() if sequence.kv.num_held)
    groups = (*roster.waiting, *roster.held.values())
    return {
        "block_size": kv.block_size,
        "num_blocks": kv.num_blocks,
        "shown": shown,
        "cached": sorted([block for block in kv.cached() if block < shown]),
        "num_cached": kv.num_cached,
        "num_free": kv.num_available - kv.num_cached,
        "num_shared": kv.num_shared,
        "num_saved": kv.num_saved,
        "evictions": kv.total_kv_evictions,
        "preemptions": roster.total_preemptions,
        "tables": [_table(sequence, shown) for sequence in islice(seated, MOST_TABLES)],
        "num_running": roster.num_running,
        "waiting": [_waiting(group) for group in groups[:MOST_WAITING]],
        "num_waiting": len(groups),
    }


def _table(sequence: Sequence, shown: int) -> dict[str, Any]:
    blocks = sequence.kv.table.held
    return {
        "request_id": sequence.group.request.request_id,
        "choice": sequence.choice,
        "blocks": [block for block in blocks if block < shown],
        "num_blocks": len(blocks),
        "num_prompt": sequence.num_prompt_tokens,
        "num_tokens": len(sequence.token_ids),
        "num_computed": sequence.kv.num_computed,
        "max_new_tokens": sequence.group.max_new_tokens,
        "shares_tail": sequence.kv.shares_tail,
    }


def _waiting(group: Group) -> dict[str, Any]:
    kept = [sequence.kv.swapped for sequence in group.sequences if sequence.kv.swapped is not None]
    return {
        "request_id": group.request.request_id,
        "state": group.state,
        "reason": group.held_for if group.state == "held" else group.wait_reason,
        "num_preemptions": group.num_preemptions,
        "num_tokens": group.num_prompt_tokens,
        "swapped_blocks": sum(len(each.keys) for each in kept),
    }

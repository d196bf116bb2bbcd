"""Preempts by swap where that is cheaper than to compute again.

Promises: a group that is swapped goes on where its last known result left it; whoever cannot be is computed again.
Must not know: whose turn it is to be preempted, how blocks are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from quire_engine.limits import SchedulerConfig
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.policies.swap_cost import SwapCost
from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.swapping_allocator import SwappingAllocator
from quire_engine.types import EngineStats


class Swapping:
    """Decides for one victim after the other."""

    def __init__(self, kv: SwappingAllocator, cost: SwapCost) -> None:
        self.total_swaps = 0
        self._kv = kv
        self._cost = cost

    def swap_out(self, group: Group, copied_from: Mapping[int, int]) -> bool:
        """Take a running group's blocks and keep what they hold; False, with nothing done, if it is to be recomputed.

        Kept is what results were taken in for. What is in flight is void, and computed again to the same end; so is
        the last known token of a beam that was waiting for the others, whose continuations are told once more.
        """
        group.forget_pending()
        shared = all(s.num_settled >= group.num_prompt_tokens for s in group.sequences) or len(group.sequences) == 1
        kept = [(s, min(s.num_settled, len(s.token_ids) - 1)) for s in (group.sequences if shared else [group.leader])]
        if not all(num_tokens > 0 for _, num_tokens in kept):
            return False
        num_blocks, num_tokens = self._kv.swap_size(kept)
        if not self._cost.prefers_swap(num_blocks=num_blocks, num_tokens=num_tokens):
            return False
        if not self._kv.swap_out(kept, copied_from):
            return False
        for sequence in group.sequences:
            if sequence.swapped is None:
                self._kv.release(sequence)
        group.set_aside(prompt_shared=shared)
        self.total_swaps += 1
        return True

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._cost.learn(prompt_tokens=prompt_tokens, num_decodes=num_decodes, seconds=seconds)

    def add_to(self, stats: EngineStats) -> EngineStats:
        """The statistics with those of the host's blocks."""
        host = self._kv.host
        return replace(
            stats,
            host_blocks_total=host.pool.num_blocks,
            host_blocks_used=host.pool.num_used,
            host_blocks_cached=host.pool.num_cached,
            total_swapped_out_blocks=host.total_out,
            total_swapped_in_blocks=host.total_in,
            total_preemptions_by_mode={
                "recompute": stats.total_preemptions - self.total_swaps,
                "swap": self.total_swaps,
            },
        )


def allocator_for(config: SchedulerConfig, stored: Iterable[bytes] = ()) -> tuple[KVAllocator, Swapping | None]:
    """The allocator, and who swaps where there is host memory for it."""
    limits = config.limits
    if config.num_host_blocks == 0:
        return (
            KVAllocator(
                num_blocks=config.num_blocks,
                block_size=limits.block_size,
                enable_prefix_caching=limits.enable_prefix_caching,
            ),
            None,
        )
    cost = SwapCost(config.swap_seconds)
    kv = SwappingAllocator(
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        block_size=limits.block_size,
        enable_prefix_caching=limits.enable_prefix_caching,
        cost=cost,
        stored=stored,
    )
    return kv, Swapping(kv, cost)

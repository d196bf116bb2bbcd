"""The allocator where there is host memory to swap to: blocks leave the pool with what they hold, and come back.

Promises: a swapped sequence gets the bytes back that it had; an evicted prefix is matched on the host while it is
there; a block that could come from two places comes from the pool. Must not know: queues, budgets, who is preempted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from quire_engine.invariants import require
from quire_engine.scheduling.host_tier import HostTier
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.moves import Moves
from quire_engine.scheduling.policies.swap_cost import SwapCost
from quire_engine.scheduling.prefix_match import PrefixMatch
from quire_engine.scheduling.swapped import Swapped

if TYPE_CHECKING:
    from quire_engine.scheduling.sequence import Group, Sequence


class SwappingAllocator(KVAllocator):
    """See `KVAllocator`.

    A full block goes by the hash of its content, whoever asks for it: it is copied out only when the pool evicts it,
    and then into a place that was promised to those who swapped it out. Other blocks are copied out at once, by keys of
    their own; siblings that shared one get a copy each when they come back.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        cost: SwapCost,
        stored: Iterable[bytes] = (),
    ) -> None:
        """`stored`: the hashes of what host blocks 0, 1, ... hold already."""
        super().__init__(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching)
        self.host = HostTier(num_host_blocks, stored)
        self._cost = cost

    def take_moves(self) -> Moves:
        return self.host.take()

    # ---- prefixes -------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence, max_tokens: int) -> PrefixMatch:
        """The longest prefix in the pool, and what follows it on the host; of a swapped sequence, what it kept."""
        if sequence.swapped is not None:
            return PrefixMatch(num_tokens=sequence.swapped.num_tokens)
        found = super().match(sequence, max_tokens)
        if not self._caching or not self._cost.prefers_restoring(num_blocks=1, num_tokens=self.block_size):
            return found
        restored = self.host.find(sequence.block_hashes[len(found.blocks) : max_tokens // self.block_size])
        if not restored:
            return found
        num_blocks = len(found.blocks) + len(restored)
        return PrefixMatch(found.blocks, num_blocks * self.block_size, restored=tuple(restored))

    def seat_cost(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Of a swapped sequence: what it takes to bring its whole group back."""
        if sequence.swapped is not None:
            return self._swap_in_cost(sequence.group)
        return super().seat_cost(sequence, match)

    def seat(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Of a swapped sequence: bring its whole group back."""
        if sequence.swapped is not None:
            self._swap_in(sequence.group)
            return
        first = len(match.blocks)
        keys = sequence.block_hashes[first : first + len(match.restored)]
        self.host.claim(keys)  # or the blocks that are taken now would push them out
        self.host.hold(keys)
        super().seat(sequence, match)
        for key, block in zip(keys, sequence.table.block_ids[first:], strict=False):
            self.host.bring(key, block)
            self._cache.register(key, block)
        # A tail is copied in the step that is planned: it counts when that one's result is there.
        sequence.num_committed = first + len(keys)
        sequence.num_certain = sequence.num_settled = sequence.num_committed * self.block_size

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        sequence.num_settled = num_computed
        if num_computed == sequence.num_prompt_tokens:  # for all choices: each of them holds its blocks already
            for sibling in sequence.group.sequences:
                sibling.num_settled = max(sibling.num_settled, num_computed)
        super().commit(sequence, num_computed)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        super().fork(parent, child, num_tokens)
        child.num_settled = min(parent.num_settled, num_tokens)

    def release(self, sequence: Sequence) -> None:
        if sequence.swapped is not None:
            self.host.drop(sequence.swapped.keys)
            sequence.swapped = None
        super().release(sequence)
        sequence.num_settled = 0

    def forget_cached(self, kept: Collection[bytes] = ()) -> tuple[int, tuple[int, ...]]:
        """What swapped sequences will go on with stays where it is, which may be the pool alone."""
        claimed = {key for key in self._cache.contents() if self.host.is_claimed(key)}
        num_blocks, _ = super().forget_cached({*kept, *claimed})
        return num_blocks, self.host.forget_unclaimed()

    # ---- swapped sequences ----------------------------------------------------------------------------------------

    def swap_size(self, kept: Iterable[tuple[Sequence, int]]) -> tuple[int, int]:
        """(blocks, tokens) that would be lost of sequences' first tokens: what others hold too would not be."""
        held: Counter[int] = Counter()
        total = 0
        for sequence, num_tokens in kept:
            held.update(sequence.table.block_ids[: sequence.table.num_blocks_for(num_tokens)])
            total += num_tokens
        own = sum(1 for block, count in held.items() if self._pool.refs(block) == count)
        return own, min(total, own * self.block_size)

    def swap_out(self, wanted: Iterable[tuple[Sequence, int]], copied_from: Mapping[int, int]) -> bool:
        """Release sequences, each with so many tokens kept on the host; False if it has not the room.

        `copied_from`: by block, where a copy into it was planned in this step that will not be made.
        """
        kept: list[tuple[Sequence, Swapped]] = []
        sources: dict[bytes, int] = {}  # of contents that are nowhere but in the sequence's own block
        private: dict[int, bytes] = {}
        for sequence, num_tokens in wanted:
            blocks = sequence.table.block_ids[: sequence.table.num_blocks_for(num_tokens)]
            full = num_tokens // self.block_size if self._caching else 0
            self._extend_hashes(sequence, full)
            keys = sequence.block_hashes[:full]
            for key, block in zip(keys, blocks, strict=False):
                if self._cache.block(key) is None and not self.host.pool.holds(key):
                    sources[key] = block
            for block in (copied_from.get(block, block) for block in blocks[full:]):
                own = self.host.arriving(block) or private.get(block)
                if own is None:
                    own = private[block] = self.host.private_key()
                    sources[own] = block
                keys.append(own)
            kept.append((sequence, Swapped(num_tokens, tuple(keys))))
        new = {key for _, swapped in kept for key in swapped.keys if not self.host.pool.is_claimed(key)}
        if len(new) > self.host.pool.num_room:
            return False
        for _, swapped in kept:
            self.host.claim(swapped.keys)
        for key, block in sources.items():
            self.host.save(key, block)
        for sequence, swapped in kept:
            self.release(sequence)
            sequence.swapped = swapped
        return True

    def _swap_in_cost(self, group: Group) -> int:
        cost = 0
        seen: set[bytes] = set()
        for sequence, swapped in _swapped(group):
            full = swapped.num_tokens // self.block_size
            cost += sequence.blocks_for_known - full
            for key in swapped.keys[:full]:
                if key not in seen:
                    seen.add(key)
                    block = self._cache.block(key)
                    cost += block is None or self._pool.refs(block) == 0
        return cost

    def _swap_in(self, group: Group) -> None:
        """Give a group's sequences what they had; what the pool still holds first, before anything of it is evicted."""
        swapped = _swapped(group)
        found: list[list[int | None]] = []
        for _, kept in swapped:
            self.host.hold(kept.keys)
            found.append([self._revive(key) for key in kept.keys[: kept.num_tokens // self.block_size]])
        brought: dict[bytes, int] = {}
        for (sequence, kept), blocks in zip(swapped, found, strict=True):
            sequence.swapped = None
            for key, block in zip(kept.keys, blocks, strict=False):
                sequence.table.extend([self._bring_full(key, brought) if block is None else block])
            sequence.table.extend([self._bring(key) for key in kept.keys[len(blocks) :]])
            sequence.num_computed = sequence.num_settled = sequence.num_certain = kept.num_tokens
            sequence.num_committed = len(blocks) if self._caching else 0
            self._grow(sequence, len(sequence.token_ids))

    def _revive(self, key: bytes) -> int | None:
        """One more reference to the pool's block with this content, if there is one."""
        block = self._cache.block(key)
        if block is not None:
            self._hold(block)
        return block

    def _bring_full(self, key: bytes, brought: dict[bytes, int]) -> int:
        """A block for a full one of several siblings, who share it."""
        if key in brought:
            self._pool.share(brought[key])
            return brought[key]
        block = brought[key] = self._bring(key)
        if self._caching:
            self._cache.register(key, block)
        return block

    def _bring(self, key: bytes) -> int:
        block = self._take()
        self.host.bring(key, block)
        return block

    def _take(self) -> int:
        block = super()._take()
        self.host.forget(block)
        return block

    def _evict(self, content: bytes, block: int) -> None:
        self.host.evict(content, block)

    # ---- the books ------------------------------------------------------------------------------------------------

    def check(self, sequences: Iterable[Sequence]) -> None:
        """I2 for the host's blocks too, and of I14: whatever a swapped sequence kept is somewhere."""
        sequences = list(sequences)
        super().check(sequences)
        swapped = [sequence.swapped for sequence in sequences if sequence.swapped is not None]
        self.host.check([key for kept in swapped for key in kept.keys])
        for kept in swapped:
            for key in kept.keys:
                is_somewhere = self.host.pool.holds(key) or self._cache.block(key) is not None
                require(is_somewhere, "a block of a swapped sequence is neither in the pool nor on the host")
        for sequence in sequences:
            require(sequence.swapped is None or not len(sequence.table), "a swapped sequence holds blocks")


def _swapped(group: Group) -> list[tuple[Sequence, Swapped]]:
    return [(sequence, sequence.swapped) for sequence in group.sequences if sequence.swapped is not None]

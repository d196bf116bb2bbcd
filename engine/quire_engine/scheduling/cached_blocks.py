"""The contents of the pool's blocks: which can be matched, which are kept when no table holds them, which are lost.

A block that can be matched is never handed out for writing. Must not know: sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from quire_engine.contract.block_hashes import short_name
from quire_engine.contract.block_record import HeldBlock
from quire_engine.contract.invariants import require, require_same
from quire_engine.contract.kv_groups import WHOLE, KVGroup
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import GenerationRequest
from quire_engine.scheduling.block_pool import BlockPool
from quire_engine.scheduling.cache_shares import Owner, PinnedBlocks
from quire_engine.scheduling.prefix_cache import GroupCaches, Recorder, Tails


class CachedBlocks:
    """One pool of blocks for all groups of layers, and the contents by which blocks are found again.

    Full blocks are found in each group of layers by the hash of all tokens up to their end. For a copy, blocks are
    found by their first tokens too (`Tails`), partial ones among them, where one group keeps every position. A block
    without a reference stays cached while it can be matched, until a block is wanted and none is free.

    `KVAllocator` gives blocks to sequences: it and its subclasses alone take, hold and drop them.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool, groups: tuple[KVGroup, ...] = (WHOLE,)
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        self.total_kv_evictions = self.total_blocks_taken = 0
        self._pool = BlockPool(num_blocks)
        self._caches = GroupCaches(groups, block_size)
        self._cache = self._caches.first  # whose contents name a block, where there is one group
        self.prefixes, self.told_blocks = self._cache.told, self._caches.told_blocks
        self.by_window = len(groups) > 1 or groups[0].window is not None
        self._tails = Tails(block_size, finds=not self.by_window)
        self._caching = enable_prefix_caching

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be taken: free ones, and cached ones without a reference."""
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        """Blocks that tables hold, or a copy that is planned."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks without a reference whose content can be matched."""
        return self._pool.shares.num_cached

    @property
    def num_shared(self) -> int:
        """Blocks that two or more tables hold."""
        return self._pool.num_shared

    def free_runs(self) -> npt.NDArray[np.int64]:
        """The lengths of all runs of neighbouring blocks that no sequence holds; O(num_blocks)."""
        return self._pool.free_runs()

    @property
    def num_saved(self) -> int:
        """Further blocks that the tables would need without sharing."""
        return self._pool.num_saved

    @property
    def pins(self) -> PinnedBlocks:
        """The blocks of prefixes that requests keep for a time."""
        return self._pool.pins

    def cached(self) -> Iterator[int]:
        """The blocks that no table holds and whose content can be matched."""
        return iter(self._pool.shares.cached())

    def can_match(self, content: bytes) -> bool:
        """Whether a block with this content can be matched, in the first group of layers."""
        return self._cache.block(content) is not None

    def matchable_names(self) -> list[list[int]]:
        """The names of the full blocks that can be matched, of each group of layers; `block_hashes.short_name`."""
        return [list(map(short_name, cache.contents())) for cache in self._caches.each]

    def is_registered(self, block: int) -> bool:
        """Whether the block is full and can be matched."""
        return self._caches.holds(block)

    def is_writable(self, block: int) -> bool:
        """Whether exactly one table holds the block and its content cannot be matched."""
        return self._pool.refs(block) == 1 and not self._caches.holds(block)

    def scope_of(self, block: int) -> str:
        """The scope that a block with content belongs to."""
        owner = self._pool.owner(block)
        return "" if owner is None else owner.scope

    def leave_out_tails(self) -> None:
        """Whole blocks alone are kept and found from now on."""
        self._tails = Tails(self.block_size, finds=False)

    # ---- others learn of contents ---------------------------------------------------------------------------------

    def tell(self, config: SchedulerConfig) -> None:
        """Tell routers, ours and others, of cached blocks, where the configuration asks for it."""
        self.prefixes.is_on, self.told_blocks.is_on = config.tells_prefixes, config.tells_blocks

    def record_in(self, recorder: Recorder) -> None:
        """Tell this recorder from now on of the blocks that can be matched."""
        for cache in self._caches.each:
            cache.recorder = recorder

    # ---- contents that no sequence brings -------------------------------------------------------------------------

    def adopt(self, content: bytes, depth: int, request: GenerationRequest, parent: bytes | None = None) -> int | None:
        """A block that can be matched by this content from now on, of no sequence; None: there is one, or no room.

        The caller fills it before the next step. `depth`: blocks before it in the request's prompt. `parent`: the
        content of the last of those blocks, or empty; None: the event is not told.
        """
        if self.by_window or not self._caching or self.can_match(content) or not self.num_available:
            return None
        block = self._take(self._pool.shares.owner(request.cache_scope, request.weight))
        self._cache.register(content, block, depth)
        if parent is not None:
            tokens = request.prompt_token_ids[depth * self.block_size : (depth + 1) * self.block_size]
            self.told_blocks.stored(content, parent, tokens, request=request)
        self._drop(block)
        return block

    def take_over(self, found: Iterable[HeldBlock]) -> set[int]:
        """Begin with these contents of an earlier run, in an empty pool; returns the blocks that have them.

        No block is taken over if cache events are published: an event names tokens, and the record of a full block has
        none.
        """
        by_scope: dict[str, Owner[int]] = {}
        owners: dict[int, Owner[int]] = {}
        begun: list[HeldBlock] = []
        caches = self._caches.each
        for each in found if self._caching and not self.told_blocks.is_on else ():
            if each.tokens:
                if self.by_window or len(each.tokens) < self._tails.least:
                    continue
                begun.append(each)
            elif each.group >= len(caches) or not caches[each.group].register(each.content, each.block):
                continue
            if each.scope not in by_scope:
                by_scope[each.scope] = self._pool.shares.owner(each.scope)
            owners[each.block] = by_scope[each.scope]
        self._pool.adopt(owners)
        for each in begun:
            self._offer(each.block, each.content, list(each.tokens))
        return {block for block in owners if self._is_known(block)}

    # ---- contents that are lost -----------------------------------------------------------------------------------

    def forget_cached(self, kept: Collection[bytes] = ()) -> tuple[int, tuple[int, ...]]:
        """Empty the prefix cache except for `kept`; returns (number of unreferenced blocks, host blocks) forgotten."""
        self._caches.keep_only(kept)
        self._tails.clear()
        return self._pool.keep_only(self._is_known), ()

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _check_blocks(self, held: Counter[int]) -> None:
        """Raise InvariantViolation unless each block is counted as often as it is held.

        The cached ones are also those that can be matched.
        """
        self._pool.check()
        self._caches.check()
        self._tails.check()
        counted = self._pool.references()
        for block in counted.keys() | held.keys():
            refs = counted.get(block, 0)
            require(refs == held[block], f"block {block} has {refs} references and is in {held[block]} tables")
        known = (self._caches.blocks() | self._tails.blocks()) - held.keys()
        require_same(known, set(self._pool.shares.cached()), "the cached blocks are not those that can be matched")

    def _take(self, owner: Owner[int] | None) -> int:
        if self._pool.is_full:
            block, loser = self._pool.evict(owner)
            self.total_kv_evictions += 1
            content = self._forget(block)
            if content is not None:
                self._evict(content, block, loser)
        self.total_blocks_taken += 1
        return self._pool.take(owner)

    def _is_known(self, block: int) -> bool:
        return self._caches.holds(block) or self._tails.holds(block)

    def _forget(self, block: int) -> bytes | None:
        """The block's content must not be matched any more; returns its hash, if it was registered."""
        self._tails.forget(block)
        return self._caches.forget(block)

    def _hold(self, block: int) -> None:
        self._pool.share(block)

    def _drop(self, block: int) -> None:
        if self._pool.drop(block):
            (self._pool.keep if self._is_known(block) else self._pool.free)(block)

    def _offer(self, block: int, parent: bytes, tokens: list[int]) -> None:
        displaced = self._tails.offer(block, parent, tokens)
        if displaced is not None and self._pool.refs(displaced) == 0 and not self._is_known(displaced):
            self._pool.forget(displaced)

    def _evict(self, content: bytes, block: int, loser: Owner[int]) -> None:
        """A hook for subclasses: the block's content, of the owner `loser`, is lost with the next write to it."""

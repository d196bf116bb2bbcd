"""Preemption by swapping: its cost rule, the allocator with host memory, and the pool of host blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Values
from dataclasses import replace

from quire_engine.contract.invariants import require
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import EngineStats
from quire_engine.scheduling.blocks import NO_MOVES, Moves, PrefixMatch, Swapped
from quire_engine.scheduling.cache_shares import CacheShares, Owner
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.sequence import Group, Sequence


def allocator_for(config: SchedulerConfig, stored: Iterable[bytes] = ()) -> tuple[KVAllocator, Swapping | None]:
    """The allocator; with host memory it swaps, and `Swapping` decides for which victims.

    Blocks are swapped of one group of layers that keeps every position.
    """
    limits = config.limits
    if config.num_host_blocks == 0:
        plain = KVAllocator(
            num_blocks=config.num_blocks,
            block_size=limits.block_size,
            enable_prefix_caching=limits.enable_prefix_caching,
            groups=config.kv_groups,
        )
        plain.tell(config)
        return plain, None
    cost = SwapCost(config.swap_seconds)
    kv = SwappingAllocator(
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        block_size=limits.block_size,
        enable_prefix_caching=limits.enable_prefix_caching,
        cost=cost,
        stored=stored,
    )
    kv.tell(config)
    return kv, Swapping(kv, cost)


class Swapping:
    """Decides for each victim between swapping and recomputation.

    A swapped group continues after its last applied result; other victims are recomputed.
    """

    def __init__(self, kv: SwappingAllocator, cost: SwapCost) -> None:
        self.total_swaps = 0
        self._kv = kv
        self._cost = cost

    def swap_out(self, group: Group, copied_from: Mapping[int, int]) -> bool:
        """Swap a running group's blocks out; False, with nothing changed, if the group is to be recomputed.

        Only tokens with applied results are kept. Tokens in flight are dropped and computed again, with the same
        result. So is the last known token of a beam that was waiting for the other beams: its candidates are computed
        once more.
        """
        group.forget_pending()
        shared = all(s.kv.num_settled >= group.num_prompt_tokens for s in group.sequences) or len(group.sequences) == 1
        kept = [
            (s, min(s.kv.num_settled, len(s.token_ids) - 1)) for s in (group.sequences if shared else [group.leader])
        ]
        if not all(num_tokens > 0 for _, num_tokens in kept):
            return False
        num_blocks, num_tokens = self._kv.swap_size(kept)
        if not self._cost.prefers_swap(num_blocks=num_blocks, num_tokens=num_tokens):
            return False
        if not self._kv.swap_out(kept, copied_from):
            return False
        for sequence in group.sequences:
            if sequence.kv.swapped is None:
                self._kv.release(sequence)
        group.preempt_swapped(prompt_shared=shared)
        self.total_swaps += 1
        return True

    def drop_lost(self, groups: Iterable[Group]) -> None:
        """Make groups that were swapped out with a block that is gone compute everything again."""
        for group in groups:
            if self._kv.has_lost(group.sequences):
                group.lose_swapped()
                for sequence in group.sequences:
                    self._kv.release(sequence)

    def take_wrong(self) -> tuple[int, ...]:
        """Host blocks whose contents turned out to be wrong since the last call, and are forgotten."""
        return self._kv.take_wrong()

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step's size and its seconds."""
        self._cost.learn(prompt_tokens=prompt_tokens, num_decodes=num_decodes, seconds=seconds)

    def add_to(self, stats: EngineStats) -> EngineStats:
        """The statistics, completed by those of host memory."""
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


class SwappingAllocator(KVAllocator):
    """A `KVAllocator` with host memory: blocks can be swapped out and in again, and evicted prefixes matched there.

    A swapped sequence gets the same bytes back. A block that is both in the pool and on the host is taken from the
    pool.

    A full block is keyed by the hash of its content, for every sequence. It is copied out only when the pool evicts it,
    into a host block that was reserved when its sequences were swapped out. A partial block is copied out at once under
    a private key; choices that shared one get a copy each when they come back.
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
        """`stored`: the content hashes of host blocks 0, 1, ... from an earlier run."""
        super().__init__(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching)
        self.host = HostTier(num_host_blocks, stored)
        self._cost = cost
        self._wrong: list[int] = []  # host blocks that `invalidate` has emptied since they were last asked for

    def take_moves(self) -> Moves:
        return self.host.take()

    # ---- prefixes -------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence, max_tokens: int) -> PrefixMatch:
        """The longest prefix in the pool and after it on the host; for a swapped sequence, the tokens that it kept."""
        if sequence.kv.swapped is not None:
            return PrefixMatch(num_tokens=sequence.kv.swapped.num_tokens)
        found = super().match(sequence, max_tokens)
        if not self._caching or not self._cost.prefers_restoring(num_blocks=1, num_tokens=self.block_size):
            return found
        restored = self.host.find(sequence.kv.block_hashes[len(found.blocks) : max_tokens // self.block_size])
        if not restored:
            return found
        num_blocks = len(found.blocks) + len(restored)
        return PrefixMatch(found.blocks, num_blocks * self.block_size, restored=tuple(restored))

    def seat_cost(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Return what seating costs; for a swapped sequence, the blocks that its whole group needs to come back."""
        if sequence.kv.swapped is not None:
            return self._swap_in_cost(sequence.group)
        return super().seat_cost(sequence, match)

    def seat(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Seat a sequence; bring the whole group of a swapped one back."""
        if sequence.kv.swapped is not None:
            self._swap_in(sequence.group)
            return
        first = len(match.blocks)
        keys = sequence.kv.block_hashes[first : first + len(match.restored)]
        self._own([sequence])
        self.host.claim(keys, sequence.kv.owner)  # otherwise the following evictions could displace them
        self.host.hold(keys)
        super().seat(sequence, match)
        for depth, (key, block) in enumerate(zip(keys, sequence.kv.table.block_ids[first:], strict=False), first):
            self.host.bring(key, block)
            if self._cache.register(key, block, depth) and self.told_blocks.is_on:
                self._tell_stored(sequence, depth)
        # A tail is copied in the step that is being planned, so it counts when that step's result is applied.
        sequence.kv.num_committed = first + len(keys)
        sequence.kv.num_certain = sequence.kv.num_settled = sequence.kv.num_committed * self.block_size

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        sequence.kv.num_settled = num_computed
        if num_computed == sequence.num_prompt_tokens:  # for all choices, which share the prompt's blocks already
            for sibling in sequence.group.sequences:
                sibling.kv.num_settled = max(sibling.kv.num_settled, num_computed)
        super().commit(sequence, num_computed)

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        super().fork(parent, child, num_tokens)
        child.kv.num_settled = min(parent.kv.num_settled, num_tokens)

    def release(self, sequence: Sequence) -> None:
        if sequence.kv.swapped is not None:
            self.host.drop(sequence.kv.swapped.keys)
            sequence.kv.swapped = None
        super().release(sequence)
        sequence.kv.num_settled = 0

    def invalidate(self, sequences: Iterable[Sequence]) -> None:
        """The host forgets these contents too, whichever sequence it has them from."""
        sequences = list(sequences)
        super().invalidate(sequences)
        self._wrong += self.host.lose({key for sequence in sequences for key in sequence.kv.block_hashes})

    def has_lost(self, sequences: Iterable[Sequence]) -> bool:
        """Whether one of these sequences was swapped out with a block that is neither in the pool nor on the host."""
        kept = [sequence.kv.swapped for sequence in sequences if sequence.kv.swapped is not None]
        return any(not self._is_kept(key) for swapped in kept for key in swapped.keys)

    def take_wrong(self) -> tuple[int, ...]:
        """See `Swapping.take_wrong`."""
        wrong, self._wrong = tuple(self._wrong), []
        return wrong

    def forget_cached(self, kept: Collection[bytes] = ()) -> tuple[int, tuple[int, ...]]:
        """Empty the prefix cache, except for blocks of swapped sequences; some of them only the pool has."""
        claimed = {key for key in self._cache.contents() if self.host.is_claimed(key)}
        num_blocks, _ = super().forget_cached({*kept, *claimed})
        return num_blocks, self.host.forget_unclaimed()

    # ---- swapped sequences ----------------------------------------------------------------------------------------

    def swap_size(self, kept: Iterable[tuple[Sequence, int]]) -> tuple[int, int]:
        """The (blocks, tokens) to swap for these sequences; blocks that other sequences hold too stay anyway."""
        held: Counter[int] = Counter()
        total = 0
        for sequence, num_tokens in kept:
            held.update(sequence.kv.table.block_ids[: sequence.kv.table.num_blocks_for(num_tokens)])
            total += num_tokens
        own = sum(1 for block, count in held.items() if self._pool.refs(block) == count)
        return own, min(total, own * self.block_size)

    def swap_out(self, wanted: Iterable[tuple[Sequence, int]], copied_from: Mapping[int, int]) -> bool:
        """Release sequences and keep the first tokens of each; False if host memory is short.

        `copied_from`: the sources of copies that this step had planned and will not make, by target block.
        """
        kept: list[tuple[Sequence, Swapped]] = []
        sources: dict[bytes, int] = {}  # contents that only the sequence's own block has
        private: dict[int, bytes] = {}
        for sequence, num_tokens in wanted:
            blocks = sequence.kv.table.block_ids[: sequence.kv.table.num_blocks_for(num_tokens)]
            full = num_tokens // self.block_size if self._caching else 0
            self._extend_hashes(sequence, full)
            keys = sequence.kv.block_hashes[:full]
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
        owner = kept[0][0].kv.owner if kept else None  # they are of one request
        for _, swapped in kept:
            self.host.claim(swapped.keys, owner)
        for key, block in sources.items():
            self.host.save(key, block, owner)
        for sequence, swapped in kept:
            self.release(sequence)
            sequence.kv.swapped = swapped
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
        """Give a group's sequences their blocks back; those still in the pool first, before they can be evicted."""
        swapped = _swapped(group)
        self._own(sequence for sequence, _ in swapped)
        found: list[list[int | None]] = []
        for _, kept in swapped:
            self.host.hold(kept.keys)
            found.append([self._revive(key) for key in kept.keys[: kept.num_tokens // self.block_size]])
        brought: dict[bytes, int] = {}
        for (sequence, kept), blocks in zip(swapped, found, strict=True):
            sequence.kv.swapped = None
            owner = sequence.kv.owner
            for index, (key, block) in enumerate(zip(kept.keys, blocks, strict=False)):
                is_away = self._cache.block(key) is None
                sequence.kv.table.extend([self._bring_full(key, brought, owner) if block is None else block])
                if is_away and self._caching and self.told_blocks.is_on:
                    self._tell_stored(sequence, index)
            sequence.kv.table.extend([self._bring(key, owner) for key in kept.keys[len(blocks) :]])
            sequence.kv.num_computed = sequence.kv.num_settled = sequence.kv.num_certain = kept.num_tokens
            sequence.kv.num_committed = len(blocks) if self._caching else 0
            self._grow(sequence, len(sequence.token_ids))

    def _revive(self, key: bytes) -> int | None:
        """Take a reference to the pool's block with this content, if there is one."""
        block = self._cache.block(key)
        if block is not None:
            self._hold(block)
        return block

    def _bring_full(self, key: bytes, brought: dict[bytes, int], owner: Owner[int] | None) -> int:
        """A block for a full block's content, which several choices of the group share."""
        if key in brought:
            self._pool.share(brought[key])
            return brought[key]
        block = brought[key] = self._bring(key, owner)
        if self._caching:
            self._cache.register(key, block)
        return block

    def _bring(self, key: bytes, owner: Owner[int] | None) -> int:
        block = self._take(owner)
        self.host.bring(key, block)
        return block

    def _take(self, owner: Owner[int] | None) -> int:
        block = super()._take(owner)
        self.host.forget(block)
        return block

    def _evict(self, content: bytes, block: int, loser: Owner[int]) -> None:
        self.host.evict(content, block, loser)

    def _is_kept(self, key: bytes) -> bool:
        return self.host.pool.holds(key) or self._cache.block(key) is not None

    # ---- invariants -----------------------------------------------------------------------------------------------

    def check(self, sequences: Iterable[Sequence]) -> None:
        """I2 for host blocks too, and I14: every block that a swapped sequence kept is in the pool or on the host."""
        sequences = list(sequences)
        super().check(sequences)
        swapped = [sequence.kv.swapped for sequence in sequences if sequence.kv.swapped is not None]
        self.host.check([key for kept in swapped for key in kept.keys])
        for kept in swapped:
            for key in kept.keys:
                require(self._is_kept(key), "a block of a swapped sequence is neither in the pool nor on the host")
        for sequence in sequences:
            require(sequence.kv.swapped is None or not len(sequence.kv.table), "a swapped sequence holds blocks")


def _swapped(group: Group) -> list[tuple[Sequence, Swapped]]:
    return [(sequence, sequence.kv.swapped) for sequence in group.sequences if sequence.kv.swapped is not None]


_PRIVATE = b"private "  # the prefix of keys for partial blocks, which only their own sequence uses


class HostTier:
    """Copies between the pool and host memory that the next step is to make.

    A step makes its copies in the order out, then in. A content may be read from the host only if it is there by then,
    and the target of a copy is not reused before.
    """

    def __init__(self, num_blocks: int, stored: Iterable[bytes] = ()) -> None:
        """`stored`: the keys that blocks 0, 1, ... hold already, the least recently used first."""
        self.pool = HostPool(num_blocks)
        for key in stored:
            self.pool.store(key)  # of no owner that is known, until a request of one uses it
        self.total_out = self.total_in = 0
        self._out: dict[int, tuple[int, bytes]] = {}  # host block -> device block, key
        self._arriving: dict[int, bytes] = {}  # device block -> key
        self._held: list[bytes] = []  # claims that last until the copies are in a step
        self._num_private = 0

    def private_key(self) -> bytes:
        """A new key for a block that only its sequence can use."""
        self._num_private += 1
        return _PRIVATE + self._num_private.to_bytes(8, "big")

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The host blocks of the longest run of stored keys from the first on, as far as they can be claimed."""
        found: list[int] = []
        room = self.pool.num_room
        for key in keys:
            if not self.pool.holds(key):
                break
            room -= not self.pool.is_claimed(key)
            if room < 0:
                break
            found.append(self.pool.block(key))
        return found

    def claim(self, keys: Iterable[bytes], owner: Owner[int] | None = None) -> None:
        """Claim contents for an owner; those that have come from files are its from now on."""
        for key in keys:
            self.pool.claim(key)
            self.pool.own(key, owner)

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.pool.drop(key, keep=not key.startswith(_PRIVATE))

    def hold(self, keys: Values[bytes]) -> None:
        """Take over claims until this plan's copies are in a step."""
        self._held += keys

    def arriving(self, block: int) -> bytes | None:
        """The key whose content is to be copied into a device block by the step that is being planned."""
        return self._arriving.get(block)

    def evict(self, key: bytes, block: int, owner: Owner[int] | None = None) -> None:
        """A matchable device block, of this owner, is about to be overwritten."""
        if self.pool.holds(key):  # true of every block that is still to be copied in
            self.pool.own(key, owner)
            self.pool.touch(key)
        else:
            self.save(key, block, owner)

    def save(self, key: bytes, block: int, owner: Owner[int] | None = None) -> None:
        """Copy a device block out, if host memory has room for the key."""
        require(block not in self._arriving, f"block {block} is copied out before its content has come in")
        target = self.pool.store(key, owner)
        if target is not None:
            self._out[target] = block, key

    def bring(self, key: bytes, block: int) -> None:
        """Copy a stored and held key into a device block."""
        require(self.pool.holds(key) and key in self._held, "a block is to come from the host that is not there")
        self._arriving[block] = key

    def forget(self, block: int) -> None:
        """A device block is handed out for writing: drop a copy into it."""
        self._arriving.pop(block, None)

    def is_claimed(self, key: bytes) -> bool:
        """Whether a swapped sequence needs this content."""
        return self.pool.is_claimed(key)

    def forget_unclaimed(self) -> tuple[int, ...]:
        """Forget every content without a claim; returns the host blocks that held them."""
        blocks = self.pool.forget_unclaimed()
        for block in blocks:
            self._out.pop(block, None)  # drop its copy
        return blocks

    def lose(self, keys: Iterable[bytes]) -> list[int]:
        """Drop contents that are wrong; return the host blocks that held them. What a planned copy reads stays."""
        blocks = [self.pool.lose(key) for key in keys if self.pool.holds(key) and key not in self._held]
        for block in blocks:
            self._out.pop(block, None)  # drop its copy
        return blocks

    def take(self) -> Moves:
        """The copies that were planned since the last call."""
        if not (self._out or self._arriving or self._held):
            return NO_MOVES
        out = tuple((block, target) for target, (block, _) in self._out.items())
        keys = tuple(b"" if key.startswith(_PRIVATE) else key for _, key in self._out.values())
        into = tuple((self.pool.block(key), block) for block, key in self._arriving.items())
        self.total_out += len(out)
        self.total_in += len(into)
        self._out, self._arriving = {}, {}
        held, self._held = self._held, []
        self.drop(held)
        return Moves(out, into, keys)

    def check(self, claimed: Iterable[bytes]) -> None:
        """Raise InvariantViolation unless every claim belongs to a swapped sequence or to a planned copy."""
        self.pool.check([*claimed, *self._held])


class HostPool:
    """Blocks of host memory by key: claimed by swapped sequences, or cached while there is room.

    Ids are 0 .. num_blocks - 1. A key is in at most one block. A key can be claimed before its content is stored: a
    block is then reserved for it. A claimed content is not lost; unclaimed contents are evicted by their owners' shares
    of the host (`CacheShares`), which are apart from those of the pool.
    """

    __slots__ = ("_block_of", "_claims", "_free", "_num_promised", "_owner_of", "_shares", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._block_of: dict[bytes, int] = {}
        self._owner_of: dict[bytes, Owner[bytes]] = {}  # of the stored keys
        self._shares: CacheShares[bytes] = CacheShares(num_blocks)  # has the stored keys without a claim
        self._claims: dict[bytes, int] = {}
        self._num_promised = 0  # claimed keys that are not stored: a block is reserved for each

    @property
    def num_used(self) -> int:
        """Blocks whose content is claimed."""
        return len(self._block_of) - self.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks whose content is kept without a claim."""
        return self._shares.num_cached

    @property
    def num_room(self) -> int:
        """Further keys that can be claimed, or stored without a claim."""
        return len(self._free) + self.num_cached - self._num_promised

    def holds(self, key: bytes) -> bool:
        return key in self._block_of

    def block(self, key: bytes) -> int:
        """The block of a stored key. Raises KeyError."""
        return self._block_of[key]

    def is_claimed(self, key: bytes) -> bool:
        return key in self._claims

    def claim(self, key: bytes) -> None:
        """Add a claim. The first claim of a key takes up room, whether the key is stored or not."""
        count = self._claims.get(key, 0)
        if count == 0:
            require(self.num_room > 0, "host blocks were promised that are not there")
            if key in self._block_of:
                self._shares.use(key, self._owner_of[key])
            else:
                self._num_promised += 1
        self._claims[key] = count + 1

    def drop(self, key: bytes, *, keep: bool) -> None:
        """Remove a claim; after the last one the content stays cached, or without `keep` is forgotten."""
        count = self._claims[key] - 1
        if count > 0:
            self._claims[key] = count
            return
        del self._claims[key]
        if key not in self._block_of:
            self._num_promised -= 1
        elif keep:
            self._shares.keep(key, self._owner_of[key])
        else:
            self._shares.drop(self._owner_of[key])
            self._forget(key)

    def store(self, key: bytes, owner: Owner[int] | None = None) -> int | None:
        """A block for a key that has none; None where it is not claimed and there is no room.

        `owner` in the pool of blocks: the same scope has the content here.
        """
        require(key not in self._block_of, "a content is stored twice on the host")
        is_claimed = key in self._claims
        if is_claimed:
            self._num_promised -= 1
        elif self.num_room < 1:
            return None
        own = self._own(owner)
        if not self._free:
            evicted, _ = self._shares.evict(own)
            self._forget(evicted)
        block = self._free.pop()
        self._block_of[key], self._owner_of[key] = block, own
        self._shares.hold(own)
        if not is_claimed:
            self._shares.keep(key, own)  # of its owner's it is evicted last
        return block

    def touch(self, key: bytes) -> None:
        """A stored key was used: without a claim it is, of its owner's, evicted last."""
        if key not in self._claims:
            owner = self._owner_of[key]
            self._shares.use(key, owner)
            self._shares.keep(key, owner)

    def own(self, key: bytes, owner: Owner[int] | None) -> None:
        """A request of this scope uses the content: if it is stored, it counts as the scope's from now on."""
        before, own = self._owner_of.get(key), self._own(owner)
        if before is None or before is own:
            return
        self._owner_of[key] = own
        self._shares.hold(own)
        if key not in self._claims:
            self._shares.use(key, before)
            self._shares.keep(key, own)
        self._shares.drop(before)

    def forget_unclaimed(self) -> tuple[int, ...]:
        """Free the blocks without a claim; returns them."""
        return tuple([self.lose(key) for key in self._shares.cached()])

    def lose(self, key: bytes) -> int:
        """Free the block of a stored key and return it. For claims on the key a block is reserved from now on."""
        block, owner = self._block_of[key], self._owner_of[key]
        if key in self._claims:
            self._num_promised += 1
        else:
            self._shares.use(key, owner)
        self._shares.drop(owner)
        self._forget(key)
        return block

    def check(self, claimed: Iterable[bytes]) -> None:
        """Raise InvariantViolation unless blocks, owners and claims agree; `claimed` has every claim once."""
        counts: dict[bytes, int] = {}
        for key in claimed:
            counts[key] = counts.get(key, 0) + 1
        require(counts == self._claims, "the claims on host blocks are not those of the swapped sequences")
        blocks = [*self._free, *self._block_of.values()]
        require(sorted(blocks) == list(range(self.num_blocks)), "the host's free and stored blocks are not its pool")
        require(self._owner_of.keys() == self._block_of.keys(), "the host's stored blocks are not those with owners")
        self._shares.check(self._owner_of.values())
        cached = set(self._shares.cached())
        for key, owner in self._owner_of.items():
            require((key in cached) != (key in self._claims), "a host block is kept and claimed at once, or neither")
            require((key in cached) == owner.has(key), "a host block is kept by another than its owner")
        promised = sum(1 for key in self._claims if key not in self._block_of)
        require(promised == self._num_promised, f"{promised} host blocks are owed, {self._num_promised} are counted")
        require(self.num_room >= 0, "more host blocks are promised than there are")

    def _own(self, owner: Owner[int] | None) -> Owner[bytes]:
        return self._shares.owner("") if owner is None else self._shares.owner(owner.scope, owner.weight)

    def _forget(self, key: bytes) -> None:
        del self._owner_of[key]
        self._free.append(self._block_of.pop(key))


_FEWEST = 32  # prompt tokens; the time of a step with fewer says more about its decodes
_WEIGHT = 0.3  # weight of the newest step in the mean


class SwapCost:
    """Whether swapping a victim out and in is cheaper than computing its tokens again.

    Recompute where tokens * seconds per token < 2 * bytes / bandwidth, else swap.

    The seconds per token are learned from steps with prompts; the seconds per block are measured at the start. Until
    such a step was seen, swapping counts as cheaper.
    """

    def __init__(self, seconds_per_block: float) -> None:
        self._seconds_per_block = seconds_per_block  # one way
        self._seconds_per_token = 0.0  # unknown

    def prefers_swap(self, *, num_blocks: int, num_tokens: int) -> bool:
        """Whether copying `num_blocks` blocks out and in is cheaper than computing `num_tokens` tokens again."""
        return self._is_cheaper(2 * num_blocks, num_tokens)

    def prefers_restoring(self, *, num_blocks: int, num_tokens: int) -> bool:
        """Whether copying `num_blocks` blocks in is cheaper than computing their tokens."""
        return self._is_cheaper(num_blocks, num_tokens)

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step's size and its seconds."""
        if prompt_tokens < _FEWEST:
            return
        rate = seconds / (prompt_tokens + num_decodes)
        known = self._seconds_per_token
        self._seconds_per_token = known + _WEIGHT * (rate - known) if known else rate

    def measured(self, seconds_per_block: float) -> None:
        """Take this time of one block's copy from now on."""
        self._seconds_per_block = seconds_per_block

    def seconds(self, num_tokens: int) -> float:
        """The time that computing so many tokens takes; 0: unknown."""
        return num_tokens * self._seconds_per_token

    def _is_cheaper(self, copies: int, num_tokens: int) -> bool:
        if self._seconds_per_token == 0:
            return True
        return copies * self._seconds_per_block <= num_tokens * self._seconds_per_token

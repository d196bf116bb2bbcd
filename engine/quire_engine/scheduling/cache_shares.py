"""Shares of a cache: the cached blocks of each owner in LRU order, those it keeps for a time, and who loses the next.

An owner is the scope of cached prefixes: an API key, a tenant or a group of tenants. A server without keys has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from quire_engine.contract.invariants import require
from quire_engine.contract.types import PinEvent

Key = TypeVar("Key", int, bytes)
PINNED_SHARE = 0.25  # of a pool, for prefixes that requests keep for a time
PATIENCE = 32  # times that the blocks are taken anew until an owner without requests has lost its share


class Owner(Generic[Key]):
    """The blocks of one scope. `CacheShares` alone writes it."""

    __slots__ = ("bound", "cached", "last", "num_held", "num_pinned", "order", "scope", "used_at", "weight")

    def __init__(self, scope: str, order: int) -> None:
        self.scope = scope
        self.order = order  # in which the owners came
        self.weight = 1.0
        self.num_held = 0  # blocks in use and cached
        self.num_pinned = 0  # blocks in use and cached; `PinnedBlocks` alone writes it
        self.cached: OrderedDict[Key, None] = OrderedDict()  # not in use, the least recently used first
        self.last: OrderedDict[Key, None] = OrderedDict()  # likewise, pinned: evicted when none of the others is left
        self.bound = 0.0  # of its newest entry in the heap; 0: it has none
        self.used_at = 0  # the number of blocks that all had taken when its last request entered

    def has(self, key: Key) -> bool:
        """Whether the block is cached for it."""
        return key in self.cached or key in self.last

    @property
    def is_spent(self) -> bool:
        """Whether it has no cached block."""
        return not self.cached and not self.last


class CacheShares(Generic[Key]):
    """Decides whose cached block is evicted: the least recently used one of the owner that holds most for its weight.

    Blocks in use count too, and so does the block that is about to be taken. So an owner may borrow what the others do
    not use, and gives it back before they lose anything of their shares: a flood of unique prompts evicts its own
    blocks. Of equals the owner that takes is the one to lose, then the one that came first. An owner of which no
    request has come for long loses all before the others lose any, but for its pinned ones. With one owner this is a
    plain LRU order. Of an owner's blocks those that are pinned are evicted after all others.

    Cost: O(1); with n > 1 owners amortised O(log n). The heap has an entry for each owner with cached blocks, and none
    is below what the owner holds: `bound` grows at once and shrinks when the entry comes to the top.
    """

    __slots__ = ("_heap", "_num_came", "_num_taken", "_owners", "_patience", "num_cached", "pinned")

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: those that the owners share."""
        self.num_cached = 0
        self.pinned: set[Key] = set()  # of all owners, in use and cached
        self._owners: OrderedDict[str, Owner[Key]] = OrderedDict()  # those that hold blocks, the idlest first
        self._heap: list[tuple[float, int, Owner[Key]]] = []  # (-bound, order, owner); kept from two owners on
        self._num_came = self._num_taken = 0
        self._patience = PATIENCE * num_blocks

    def owner(self, scope: str, weight: float = 1.0) -> Owner[Key]:
        """The owner of this scope, of which a request enters, with the weight of that request."""
        owner = self._owners.get(scope)
        if owner is None:
            self._num_came += 1
            owner = Owner(scope, self._num_came)
        else:
            self._owners.move_to_end(scope)
        owner.used_at = self._num_taken
        if owner.weight != weight:
            owner.weight = weight
            self._raise(owner)
        return owner

    def hold(self, owner: Owner[Key]) -> None:
        """The owner has one more block, in use."""
        if owner.num_held == 0:
            self._owners[owner.scope] = owner
            if len(self._owners) == 2:
                self._rebuild()
        owner.num_held += 1
        self._num_taken += 1
        self._raise(owner)

    def drop(self, owner: Owner[Key]) -> None:
        """The owner has one block less, which was in use."""
        owner.num_held -= 1
        if owner.num_held == 0:
            del self._owners[owner.scope]

    def keep(self, key: Key, owner: Owner[Key]) -> None:
        """A block of the owner is no longer in use, and cached: of the owner's it is evicted last."""
        require(not owner.has(key), "a block is cached twice")
        (owner.last if key in self.pinned else owner.cached)[key] = None
        self.num_cached += 1
        self._raise(owner)

    def use(self, key: Key, owner: Owner[Key]) -> None:
        """A cached block of the owner is in use again."""
        require(owner.has(key), "a block that is not cached is to be used as one that is")
        del (owner.last if key in self.pinned else owner.cached)[key]
        self.num_cached -= 1

    def pin(self, key: Key, owner: Owner[Key]) -> None:
        """Evict a block of the owner, in use or cached, after its others from now on."""
        self.pinned.add(key)
        if key in owner.cached:
            del owner.cached[key]
            owner.last[key] = None

    def unpin(self, key: Key, owner: Owner[Key]) -> None:
        """The pinned block is as any other of the owner; a cached one is its least recently used."""
        self.pinned.discard(key)
        if key in owner.last:
            del owner.last[key]
            owner.cached[key] = None
            owner.cached.move_to_end(key, last=False)

    def total_weight(self, owner: Owner[Key]) -> float:
        """The weights of all owners that hold blocks, and of this one."""
        others = sum(each.weight for each in self._owners.values() if each is not owner)
        return others + owner.weight

    def evict(self, taker: Owner[Key] | None) -> tuple[Key, Owner[Key]]:
        """Remove the next cached block, for an owner that takes its room; returns it with the owner that had it."""
        require(self.num_cached > 0, "there is no cached block to evict")
        owner = self._most(taker)
        key, _ = (owner.cached or owner.last).popitem(last=False)
        self.num_cached -= 1
        self.drop(owner)
        return key, owner

    def cached(self) -> list[Key]:
        """The cached blocks of each owner in the order of their eviction; with one owner, of all."""
        return [key for owner in self._owners.values() for keys in (owner.cached, owner.last) for key in keys]

    def check(self, held: Collection[Owner[Key]]) -> None:
        """Raise InvariantViolation unless counts and heap are right; `held` has each owner once for each block."""
        counts: dict[Owner[Key], int] = {}
        for owner in held:
            counts[owner] = counts.get(owner, 0) + 1
        require(set(counts) == set(self._owners.values()), "the owners of blocks are not those that are known")
        for owner, count in counts.items():
            require(count == owner.num_held, f"an owner has {count} blocks, {owner.num_held} are counted")
        cached = sum(len(owner.cached) + len(owner.last) for owner in counts)
        require(cached == self.num_cached, f"{cached} blocks are cached, {self.num_cached} are counted")
        for owner in counts:
            is_right = self.pinned.isdisjoint(owner.cached) and self.pinned >= owner.last.keys()
            require(is_right, "a pinned block is evicted among others, or another one after them")
        if len(counts) > 1:
            listed = {(-bound, owner) for bound, _, owner in self._heap}
            for owner in counts:
                is_ranked = owner.num_held / owner.weight <= owner.bound and (owner.bound, owner) in listed
                require(is_ranked or owner.is_spent, "an owner with cached blocks is not ranked")

    def _most(self, taker: Owner[Key] | None) -> Owner[Key]:
        idlest = next(iter(self._owners.values()))
        if len(self._owners) == 1:
            return idlest
        if self._num_taken - idlest.used_at > self._patience:
            if idlest.cached:
                return idlest
            self._owners.move_to_end(idlest.scope)  # its requests are running all the time
            idlest.used_at = self._num_taken
        heap = self._heap
        while True:
            bound, order, owner = heap[0]
            if -bound != owner.bound:  # a newer entry counts
                heappop(heap)
            elif owner.is_spent:
                heappop(heap)
                owner.bound = 0.0
            elif owner.num_held / owner.weight < owner.bound:
                owner.bound = owner.num_held / owner.weight
                heapreplace(heap, (-owner.bound, order, owner))
            elif taker is not None and not taker.is_spent and (taker.num_held + 1) / taker.weight >= owner.bound:
                return taker
            else:
                return owner

    def _raise(self, owner: Owner[Key]) -> None:
        """See that the owner's entry is not below what it holds."""
        if len(self._owners) > 1 and not owner.is_spent and owner.num_held / owner.weight > owner.bound:
            owner.bound = owner.num_held / owner.weight
            heappush(self._heap, (-owner.bound, owner.order, owner))
            if len(self._heap) > 2 * len(self._owners) + 64:
                self._rebuild()

    def _rebuild(self) -> None:
        for owner in self._owners.values():
            owner.bound = 0.0 if owner.is_spent else owner.num_held / owner.weight
        self._heap = [(-owner.bound, owner.order, owner) for owner in self._owners.values() if owner.bound]
        heapify(self._heap)


@dataclass(frozen=True, slots=True)
class _Pin:
    owner: Owner[int]
    until: float


class PinnedBlocks:
    """The blocks of prefixes that requests ask to keep for a time. Each has an end, which a later request may put off.

    Of its owner's cached blocks a pinned one is evicted after all others. Which owner loses a block is decided as
    without pins (`CacheShares`), except that an owner of which no request has come for long keeps its pinned ones. So a
    pin costs its owner alone: no other owner's share gets smaller by it. An owner has at most its part, by weight, of
    the share of the pool that may be pinned. No admission depends on pins: a pinned block that no table holds counts as
    available as any cached one does.
    """

    __slots__ = ("_due", "_of", "_shares", "_totals", "most", "now")

    def __init__(self, shares: CacheShares[int], num_blocks: int) -> None:
        """`shares`: learns of what is pinned; `num_blocks`: of the pool."""
        self.most = int(PINNED_SHARE * num_blocks)  # blocks of all owners together
        self.now = 0.0  # of the last step that was planned, in seconds
        self._totals: dict[PinEvent, int] = {"pinned": 0, "refused": 0, "expired": 0, "evicted": 0}
        self._shares = shares
        self._of: dict[int, _Pin] = {}
        self._due: list[tuple[float, int]] = []  # (end, block); of a block whose end was moved, old ones too

    def __len__(self) -> int:
        return len(self._of)

    def pin(self, blocks: Iterable[tuple[int, Owner[int]]], seconds: float) -> None:
        """Pin blocks, each with its owner, for so long from now on: the first ones first, as far as there is room."""
        until, room, whose = self.now + seconds, 0, None
        for block, owner in blocks:
            before = self._of.get(block)
            if before is None:
                if owner is not whose:  # its weight among all is the same for all of its blocks
                    room, whose = self._room(owner), owner
                if room <= 0:
                    self._totals["refused"] += 1
                    continue
                room -= 1
                owner.num_pinned += 1
                self._totals["pinned"] += 1
                self._shares.pin(block, owner)
            elif before.until >= until:
                continue
            self._of[block] = _Pin(owner, until)
            heappush(self._due, (until, block))
        self._forget_old_ends()

    def advance(self, now: float) -> None:
        """A step is planned at this time: pins whose end has come are let go."""
        self.now = now
        while self._due and self._due[0][0] <= now:
            until, block = heappop(self._due)
            pin = self._of.get(block)
            if pin is not None and pin.until == until:
                self._end(block, pin)
                self._totals["expired"] += 1

    def drop(self, block: int, *, is_evicted: bool = False) -> None:
        """The block's content is lost. Without a pin nothing changes."""
        pin = self._of.get(block)
        if pin is not None:
            self._end(block, pin)
            self._totals["evicted"] += is_evicted

    def totals(self) -> dict[PinEvent, int]:
        """Blocks since the start: pinned, refused for want of room, let go at their end, evicted before it."""
        return dict(self._totals)

    def check(self) -> None:
        """Raise InvariantViolation unless counts, owners and ends agree."""
        counts: dict[Owner[int], int] = {}
        for pin in self._of.values():
            counts[pin.owner] = counts.get(pin.owner, 0) + 1
        for owner, count in counts.items():
            require(owner.num_pinned == count, f"an owner has {count} pinned blocks, {owner.num_pinned} are counted")
        require(len(self._of) <= self.most, f"{len(self._of)} blocks are pinned, {self.most} may be")
        require(self._shares.pinned == self._of.keys(), "the cache's order has other pins than there are")
        ends = set(self._due)
        require(all((pin.until, block) in ends for block, pin in self._of.items()), "a pin has no end")

    def _room(self, owner: Owner[int]) -> int:
        """Pins that an owner may still have: its part of the share by its weight, and what all have left."""
        own = int(self.most * owner.weight / self._shares.total_weight(owner))
        return min(own - owner.num_pinned, self.most - len(self._of))

    def _end(self, block: int, pin: _Pin) -> None:
        del self._of[block]
        pin.owner.num_pinned -= 1
        self._shares.unpin(block, pin.owner)
        self._forget_old_ends()

    def _forget_old_ends(self) -> None:
        """Keep the list of ends from growing by those that were moved, or came early."""
        if len(self._due) > 2 * len(self._of) + _FEW:
            self._due = sorted((each.until, which) for which, each in self._of.items())


_FEW = 64  # old ends that are not worth a clean-up

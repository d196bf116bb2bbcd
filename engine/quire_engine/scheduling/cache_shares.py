"""Shares of a cache: the cached blocks of each owner in LRU order, and the owner that loses the next one.

An owner is the scope of cached prefixes: an API key, a tenant or a group of tenants. A server without keys has one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from quire_engine.invariants import require

Key = TypeVar("Key", int, bytes)
PATIENCE = 32  # times that the blocks are taken anew until an owner without requests has lost its share


class Owner(Generic[Key]):
    """The blocks of one scope. `CacheShares` alone writes it."""

    __slots__ = ("bound", "cached", "num_held", "order", "scope", "used_at", "weight")

    def __init__(self, scope: str, order: int) -> None:
        self.scope = scope
        self.order = order  # in which the owners came
        self.weight = 1.0
        self.num_held = 0  # blocks in use and cached
        self.cached: OrderedDict[Key, None] = OrderedDict()  # not in use, the least recently used first
        self.bound = 0.0  # of its newest entry in the heap; 0: it has none
        self.used_at = 0  # the number of blocks that all had taken when its last request entered


class CacheShares(Generic[Key]):
    """Decides whose cached block is evicted: the least recently used one of the owner that holds most for its weight.

    Blocks in use count too, and so does the block that is about to be taken. So an owner may borrow what the others do
    not use, and gives it back before they lose anything of their shares: a flood of unique prompts evicts its own
    blocks. Of equals the owner that takes is the one to lose, then the one that came first. An owner of which no
    request has come for long loses all before the others lose any. With one owner this is a plain LRU order.

    Cost: O(1); with n > 1 owners amortised O(log n). The heap has an entry for each owner with cached blocks, and none
    is below what the owner holds: `bound` grows at once and shrinks when the entry comes to the top.
    """

    __slots__ = ("_heap", "_num_came", "_num_taken", "_owners", "_patience", "num_cached")

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks`: those that the owners share."""
        self.num_cached = 0
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
        require(key not in owner.cached, "a block is cached twice")
        owner.cached[key] = None
        self.num_cached += 1
        self._raise(owner)

    def use(self, key: Key, owner: Owner[Key]) -> None:
        """A cached block of the owner is in use again."""
        require(key in owner.cached, "a block that is not cached is to be used as one that is")
        del owner.cached[key]
        self.num_cached -= 1

    def evict(self, taker: Owner[Key] | None) -> tuple[Key, Owner[Key]]:
        """Remove the next cached block, for an owner that takes its room; returns it with the owner that had it."""
        require(self.num_cached > 0, "there is no cached block to evict")
        owner = self._most(taker)
        key, _ = owner.cached.popitem(last=False)
        self.num_cached -= 1
        self.drop(owner)
        return key, owner

    def cached(self) -> list[Key]:
        """The cached blocks of each owner in the order of their eviction; with one owner, of all."""
        return [key for owner in self._owners.values() for key in owner.cached]

    def check(self, held: Collection[Owner[Key]]) -> None:
        """Raise InvariantViolation unless counts and heap are right; `held` has each owner once for each block."""
        counts: dict[Owner[Key], int] = {}
        for owner in held:
            counts[owner] = counts.get(owner, 0) + 1
        require(set(counts) == set(self._owners.values()), "the owners of blocks are not those that are known")
        for owner, count in counts.items():
            require(count == owner.num_held, f"an owner has {count} blocks, {owner.num_held} are counted")
        cached = sum(len(owner.cached) for owner in counts)
        require(cached == self.num_cached, f"{cached} blocks are cached, {self.num_cached} are counted")
        if len(counts) > 1:
            listed = {(-bound, owner) for bound, _, owner in self._heap}
            for owner in counts:
                is_ranked = owner.num_held / owner.weight <= owner.bound and (owner.bound, owner) in listed
                require(is_ranked or not owner.cached, "an owner with cached blocks is not ranked")

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
            elif not owner.cached:
                heappop(heap)
                owner.bound = 0.0
            elif owner.num_held / owner.weight < owner.bound:
                owner.bound = owner.num_held / owner.weight
                heapreplace(heap, (-owner.bound, order, owner))
            elif taker is not None and taker.cached and (taker.num_held + 1) / taker.weight >= owner.bound:
                return taker
            else:
                return owner

    def _raise(self, owner: Owner[Key]) -> None:
        """See that the owner's entry is not below what it holds."""
        if len(self._owners) > 1 and owner.cached and owner.num_held / owner.weight > owner.bound:
            owner.bound = owner.num_held / owner.weight
            heappush(self._heap, (-owner.bound, owner.order, owner))
            if len(self._heap) > 2 * len(self._owners) + 64:
                self._rebuild()

    def _rebuild(self) -> None:
        for owner in self._owners.values():
            owner.bound = owner.num_held / owner.weight if owner.cached else 0.0
        self._heap = [(-owner.bound, owner.order, owner) for owner in self._owners.values() if owner.bound]
        heapify(self._heap)

"""The pool against plain lists: the same blocks, owners and counts, the same order of reuse."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_engine.scheduling.block_pool import BlockPool
from support.scheduler_model import order_of_reuse

SCOPES = st.sampled_from(["", "a", "b", "c"])
WEIGHTS = st.sampled_from([0.5, 1.0, 1.0, 3.0])


class PoolMachine(RuleBasedStateMachine):
    """Take, evict, share, drop, keep, forget, pin and let pins end, for several owners."""

    scopes: st.SearchStrategy[str] = SCOPES

    @initialize(size=st.integers(1, 8))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.free = list(range(size))  # the next to be taken first
        self.cached: list[int] = []  # of all owners, the least recently used first
        self.refs = dict.fromkeys(range(size), 0)
        self.scope: dict[int, str] = {}  # by block that is not free
        self.weight: dict[str, float] = {}
        self.came: list[str] = []  # scopes with blocks, in the order in which they came
        self.idlest: list[str] = []  # the same in the order of their last request
        self.used_at: dict[str, int] = {}
        self.taken = 0
        self.now, self.most = 0.0, size // 2
        self.pinned: dict[int, float] = {}  # the end of each block's pin
        self.pool.pins.most = self.most
        self.pool.shares._patience = 2 * size

    def held(self, scope: str, more: int = 0) -> float:
        """The blocks of a scope, and some more, over its weight."""
        return (more + sum(of == scope for of in self.scope.values())) / self.weight[scope]

    def next_evicted(self, scope: str) -> int:
        """The least recently used block of the scope that has most over weight; the taker's next block counts too."""
        owners = {self.scope[block] for block in self.cached}
        idlest = self.idlest[0]
        if len(self.came) > 1 and self.taken - self.used_at[idlest] > 2 * len(self.refs):
            for block in self.cached:
                if self.scope[block] == idlest and block not in self.pinned:
                    return block
            self.use(idlest)
        most = max(self.held(owner) for owner in owners)
        first = next(owner for owner in self.came if owner in owners and self.held(owner) == most)
        if len(self.came) > 1 and scope in owners and self.held(scope, 1) >= most:
            first = scope
        own = [block for block in self.cached if self.scope[block] == first]
        return min(own, key=lambda block: block in self.pinned)

    def forget(self, block: int, taker: str | None = None) -> None:
        """A scope without blocks has gone, unless it is the one that takes the block: it keeps its place."""
        scope = self.scope.pop(block)
        self.pinned.pop(block, None)
        if scope not in self.scope.values() and scope != taker:
            self.came.remove(scope)
            self.idlest.remove(scope)

    def use(self, scope: str) -> None:
        self.used_at[scope] = self.taken
        if scope in self.idlest:
            self.idlest.remove(scope)
            self.idlest.append(scope)

    @precondition(lambda self: self.free or self.cached)
    @rule(data=st.data(), weight=WEIGHTS)
    def take(self, data: st.DataObject, weight: float) -> None:
        scope = data.draw(self.scopes)
        owner = self.pool.shares.owner(scope, weight)
        self.weight[scope] = weight
        self.use(scope)
        assert self.pool.is_full == (not self.free)
        if not self.free:
            block = self.next_evicted(scope)
            evicted, loser = self.pool.evict(owner)
            assert (evicted, loser.scope) == (block, self.scope[block])
            self.cached.remove(block)
            self.forget(block, taker=scope)
            self.free.insert(0, block)
        block = self.pool.take(owner)
        assert block == self.free.pop(0)
        self.refs[block], self.scope[block] = 1, scope
        if scope not in self.came:
            self.came.append(scope)
            self.idlest.append(scope)
        self.taken += 1

    @precondition(lambda self: len(self.free) < len(self.refs))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.scope)))
        self.pool.share(block)
        if block in self.cached:
            self.cached.remove(block)
        self.refs[block] += 1

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data(), is_known=st.booleans())
    def drop(self, data: st.DataObject, is_known: bool) -> None:
        block = data.draw(st.sampled_from([b for b, refs in self.refs.items() if refs]))
        self.refs[block] -= 1
        assert self.pool.drop(block) == (self.refs[block] == 0)
        if self.refs[block] == 0 and is_known:
            self.pool.keep(block)
            self.cached.append(block)
        elif self.refs[block] == 0:
            self.pool.free(block)
            self.forget(block)
            self.free.insert(0, block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.cached))
        self.pool.forget(block)
        self.cached.remove(block)
        self.forget(block)
        self.free.insert(0, block)

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data(), seconds=st.integers(1, 4))
    def pin(self, data: st.DataObject, seconds: int) -> None:
        used = sorted(block for block, refs in self.refs.items() if refs)
        blocks = data.draw(st.lists(st.sampled_from(used), unique=True))
        self.pool.pin(blocks, float(seconds))
        total = sum(self.weight[scope] for scope in self.came)
        for block in blocks:
            scope = self.scope[block]
            own = sum(self.scope[other] == scope for other in self.pinned)
            room = min(int(self.most * self.weight[scope] / total) - own, self.most - len(self.pinned))
            if block in self.pinned or room > 0:
                self.pinned[block] = max(self.pinned.get(block, 0.0), self.now + seconds)

    @rule()
    def advance(self) -> None:
        self.now += 1.0
        self.pool.pins.advance(self.now)
        # In the order of their ends; each is then the least recently used of its owner.
        for _, block in sorted((until, block) for block, until in self.pinned.items() if until <= self.now):
            del self.pinned[block]
            if block in self.cached:
                self.cached.remove(block)
                self.cached.insert(0, block)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert order_of_reuse(self.pool)[: len(self.free)] == self.free
            for scope in self.came:
                own = [block for block in self.cached if self.scope[block] == scope]
                owner = self.pool.shares._owners[scope]
                assert list(owner.cached) == [block for block in own if block not in self.pinned]
                assert list(owner.last) == [block for block in own if block in self.pinned]
            assert len(self.pool.pins) == len(self.pinned)
            assert self.pool.num_free == len(self.free) + len(self.cached)
            assert self.pool.shares.num_cached == len(self.cached)
            assert {block: self.pool.refs(block) for block in self.refs} == self.refs
            assert self.pool.num_shared == sum(refs > 1 for refs in self.refs.values())
            assert self.pool.num_saved == sum(refs - 1 for refs in self.refs.values() if refs)


class OneOwnerMachine(PoolMachine):
    """A server without keys: one list, as if there were no owners."""

    scopes = st.just("")

    @invariant()
    def one_list(self) -> None:
        if hasattr(self, "pool"):
            last = [block for block in self.cached if block in self.pinned]
            assert order_of_reuse(self.pool) == [*self.free, *(set_aside(self.cached, last)), *last]


def set_aside(blocks: list[int], others: list[int]) -> list[int]:
    return [block for block in blocks if block not in others]


PoolMachine.TestCase.settings = OneOwnerMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=50, deadline=None
)
TestPool = PoolMachine.TestCase
TestOneOwner = OneOwnerMachine.TestCase

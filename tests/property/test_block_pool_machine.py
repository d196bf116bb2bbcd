"""The pool against plain lists: the same blocks, owners and counts, the same order of reuse."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_engine.scheduling.block_pool import BlockPool

SCOPES = st.sampled_from(["", "a", "b", "c"])
WEIGHTS = st.sampled_from([0.5, 1.0, 1.0, 3.0])


class PoolMachine(RuleBasedStateMachine):
    """Take, evict, share, drop, keep and forget, for several owners."""

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
        self.pool.shares._patience = 2 * size

    def held(self, scope: str, more: int = 0) -> float:
        """The blocks of a scope, and some more, over its weight."""
        return (more + sum(of == scope for of in self.scope.values())) / self.weight[scope]

    def next_evicted(self, scope: str) -> int:
        """The least recently used block of the scope that has most over weight; the taker's next block counts too."""
        owners = {self.scope[block] for block in self.cached}
        idlest = self.idlest[0]
        if len(self.came) > 1 and self.taken - self.used_at[idlest] > 2 * len(self.refs):
            if idlest in owners:
                return next(block for block in self.cached if self.scope[block] == idlest)
            self.use(idlest)
        most = max(self.held(owner) for owner in owners)
        first = next(owner for owner in self.came if owner in owners and self.held(owner) == most)
        if len(self.came) > 1 and scope in owners and self.held(scope, 1) >= most:
            first = scope
        return next(block for block in self.cached if self.scope[block] == first)

    def forget(self, block: int) -> None:
        scope = self.scope.pop(block)
        if scope not in self.scope.values():
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
            self.forget(block)
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

    @invariant()
    def same(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.free_blocks()[: len(self.free)] == self.free
            for scope in self.came:
                own = [block for block in self.cached if self.scope[block] == scope]
                assert list(self.pool.shares._owners[scope].cached) == own
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
            assert self.pool.free_blocks() == [*self.free, *self.cached]


PoolMachine.TestCase.settings = OneOwnerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None
)
TestPool = PoolMachine.TestCase
TestOneOwner = OneOwnerMachine.TestCase

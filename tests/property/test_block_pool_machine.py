"""The pool against a plain list: the same blocks, the same counts, the same order of reuse."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_engine.scheduling.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Take, share, drop and reorder."""

    @initialize(size=st.integers(1, 6))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.free = list(range(size))
        self.refs = dict.fromkeys(range(size), 0)

    @precondition(lambda self: self.free)
    @rule()
    def take(self) -> None:
        block = self.pool.take()
        assert block == self.free.pop(0)
        self.refs[block] = 1

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.refs)))
        self.pool.share(block)
        if block in self.free:
            self.free.remove(block)
        self.refs[block] += 1

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data(), first=st.booleans())
    def drop(self, data: st.DataObject, first: bool) -> None:
        block = data.draw(st.sampled_from([b for b, refs in self.refs.items() if refs]))
        self.refs[block] -= 1
        assert self.pool.drop(block) == (self.refs[block] == 0)
        if self.refs[block] == 0 and first:
            self.pool.free_first(block)
            self.free.insert(0, block)
        elif self.refs[block] == 0:
            self.pool.free_last(block)
            self.free.append(block)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert list(self.pool.free_blocks()) == self.free
            assert self.pool.num_free == len(self.free)
            assert {block: self.pool.refs(block) for block in self.refs} == self.refs
            assert self.pool.num_shared == sum(refs > 1 for refs in self.refs.values())
            assert self.pool.num_saved == sum(refs - 1 for refs in self.refs.values() if refs)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase

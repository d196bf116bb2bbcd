"""The pool's list and counts, one operation at a time."""

from __future__ import annotations

import pytest

from quire_engine.invariants import InvariantViolation
from quire_engine.scheduling.block_pool import BlockPool


def test_blocks_come_in_order_and_run_out() -> None:
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(InvariantViolation, match="empty pool"):
        pool.take()


def test_worthless_blocks_are_reused_first_and_cached_ones_in_order_of_release() -> None:
    pool = BlockPool(4)
    for _ in range(4):
        pool.take()
    for block in range(4):
        assert pool.drop(block)
    pool.free_last(2)
    pool.free_last(0)
    pool.free_first(3)
    pool.free_first(1)
    assert list(pool.free_blocks()) == [1, 3, 2, 0]
    assert [pool.take() for _ in range(4)] == [1, 3, 2, 0]


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    assert pool.refs(block) == 2
    assert not pool.drop(block)
    assert pool.drop(block)


def test_sharing_a_free_block_takes_it_off_the_list() -> None:
    pool = BlockPool(3)
    pool.share(1)
    assert list(pool.free_blocks()) == [0, 2]
    assert pool.refs(1) == 1
    pool.check()


def test_double_release_is_a_violation() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.drop(block)
    pool.free_first(block)
    with pytest.raises(InvariantViolation, match="freed twice"):
        pool.free_first(block)
    with pytest.raises(InvariantViolation, match="more often"):
        pool.drop(block)


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.drop(pool.take())
    with pytest.raises(InvariantViolation, match="2 blocks have no reference, 1 are free"):
        pool.check()

"""The pool's lists and counts, one operation at a time."""

from __future__ import annotations

import pytest

from quire_engine.contract.invariants import InvariantViolation
from quire_engine.scheduling.block_pool import BlockPool
from quire_engine.scheduling.cache_shares import PATIENCE
from support.scheduler_model import order_of_reuse


def cached(pool: BlockPool, scope: str, count: int, weight: float = 1.0) -> list[int]:
    """So many blocks that the scope has computed and no longer uses."""
    owner = pool.shares.owner(scope, weight)
    blocks = []
    for _ in range(count):
        if pool.is_full:
            pool.evict(owner)
        blocks.append(pool.take(owner))
    for block in blocks:
        assert pool.drop(block)
        pool.keep(block)
    return blocks


def kept(pool: BlockPool) -> dict[str, int]:
    """The number of cached blocks of each scope."""
    pool.check()
    return {owner.scope: len(owner.cached) for owner in pool.shares._owners.values()}


def test_blocks_come_in_order_and_run_out() -> None:
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(InvariantViolation, match="empty pool"):
        pool.take()
    with pytest.raises(InvariantViolation, match="no cached block"):
        pool.evict(None)


def test_worthless_blocks_are_reused_first_and_cached_ones_in_order_of_release() -> None:
    pool = BlockPool(4)
    for _ in range(4):
        pool.take()
    for block in range(4):
        assert pool.drop(block)
    pool.keep(2)
    pool.keep(0)
    pool.free(3)
    pool.free(1)
    assert order_of_reuse(pool) == [1, 3, 2, 0]
    assert [pool.take() for _ in range(2)] == [1, 3]
    assert [pool.evict(None)[0] for _ in range(2)] == [2, 0]


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    assert pool.refs(block) == 2
    assert not pool.drop(block)
    assert pool.drop(block)


def test_sharing_a_cached_block_takes_it_off_the_list() -> None:
    pool = BlockPool(3)
    cached(pool, "", 3)
    pool.share(1)
    assert order_of_reuse(pool) == [0, 2]
    assert pool.refs(1) == 1
    pool.check()


def test_double_release_is_a_violation() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.drop(block)
    pool.free(block)
    with pytest.raises(InvariantViolation, match="freed twice"):
        pool.free(block)
    with pytest.raises(InvariantViolation, match="more often"):
        pool.drop(block)
    (kept,) = cached(pool, "", 1)
    with pytest.raises(InvariantViolation, match="freed twice"):
        pool.free(kept)
    with pytest.raises(InvariantViolation, match="cached twice"):
        pool.keep(kept)


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(2)
    pool.drop(pool.take())
    with pytest.raises(InvariantViolation, match=r"blocks are lost.*\[0\]"):
        pool.check()


def test_a_message_about_many_blocks_stays_one_short_line() -> None:
    pool = BlockPool(5000)
    for block in [pool.take() for _ in range(5000)]:
        pool.drop(block)
    with pytest.raises(InvariantViolation, match=r"^blocks are lost.*, 5000 of them: \[0, 1, 2, 3, 4, 5, 6, 7\]$"):
        pool.check()


def test_check_sees_a_block_that_counts_for_another_owner() -> None:
    pool = BlockPool(4)
    cached(pool, "a", 2)
    pool._owner_of[pool.take(pool.shares.owner("b"))] = pool.shares.owner("a")
    with pytest.raises(InvariantViolation, match="owners of blocks"):
        pool.check()


def test_contents_that_are_no_longer_known_go_behind_the_free_blocks() -> None:
    pool = BlockPool(5)
    cached(pool, "", 4)
    assert pool.keep_only(lambda block: block == 2) == 3
    assert order_of_reuse(pool) == [4, 0, 1, 3, 2]
    pool.check()


def test_a_flood_evicts_its_own_blocks() -> None:
    """What others have cached is theirs up to their share, however much one tenant computes."""
    pool = BlockPool(100)
    cached(pool, "victim", 30)
    for _ in range(50):
        cached(pool, "flood", 20)
    assert kept(pool) == {"victim": 30, "flood": 70}


def test_a_share_is_lent_and_comes_back() -> None:
    pool = BlockPool(100)
    cached(pool, "a", 100)
    assert kept(pool) == {"a": 100}, "nobody else wants it"
    cached(pool, "b", 20)
    assert kept(pool) == {"a": 80, "b": 20}
    for _ in range(5):
        cached(pool, "b", 20)
    assert kept(pool) == {"a": 50, "b": 50}


def test_an_owner_that_is_gone_keeps_nothing_for_ever() -> None:
    """Blocks that fifty tenants have left are lent to those that still ask, after a while in which they were kept."""
    pool = BlockPool(100)
    for number in range(50):
        cached(pool, f"once {number}", 2)
    for _ in range((PATIENCE - 1) * 100):
        cached(pool, "busy", 1)
    assert kept(pool)["busy"] == 1
    for turn in range(400):
        cached(pool, "busy", 1)
        if turn % 20 == 0:
            cached(pool, "now and then", 1)
    assert kept(pool) == {"busy": 80, "now and then": 20}


@pytest.mark.parametrize(("weights", "expected"), [((1, 1), (50, 50)), ((1, 3), (25, 75)), ((0.5, 1), (33, 67))])
def test_shares_follow_weights(weights: tuple[float, float], expected: tuple[int, int]) -> None:
    pool = BlockPool(100)
    for _ in range(40):
        for scope, weight in zip("ab", weights, strict=True):
            cached(pool, scope, 5, weight)
    counts = kept(pool)
    assert (counts["a"], counts["b"]) == pytest.approx(expected, abs=5)


def test_blocks_in_use_count_towards_a_share() -> None:
    """So what a flood has running is paid for with what it has cached, before anybody else pays."""
    pool = BlockPool(100)
    cached(pool, "victim", 30)
    cached(pool, "flood", 40)
    owner = pool.shares.owner("flood")
    for _ in range(70):
        if pool.is_full:
            pool.evict(owner)
        pool.take(owner)
    assert kept(pool) == {"victim": 30, "flood": 0}
    pool.evict(owner)
    assert kept(pool) == {"victim": 29, "flood": 0}, "no other block is left"

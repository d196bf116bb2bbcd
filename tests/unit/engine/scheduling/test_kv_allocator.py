"""Blocks for sequences: matching, sharing, copying, giving back."""

from __future__ import annotations

import pytest

from quire_engine.contract.invariants import InvariantViolation
from quire_engine.scheduling.blocks import NO_MATCH, PageTable, SequenceKV
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.running_decodes import unused_slots
from quire_engine.scheduling.sequence import Group, Sequence
from support.fake_executor import request


def allocator(num_blocks: int = 8, *, caching: bool = True) -> KVAllocator:
    return KVAllocator(num_blocks=num_blocks, block_size=4, enable_prefix_caching=caching)


def sequence(tokens: list[int], salt: str = "") -> Sequence:
    group = Group(request=request("r", tuple(tokens), salt=salt), arrival=0, added_step=0)
    return Sequence(
        sequence_id=0,
        choice=0,
        group=group,
        own_token_ids=tokens,
        num_prompt_tokens=len(tokens),
        kv=SequenceKV(tables=(PageTable(4),)),
    )


def computed(kv: KVAllocator, tokens: list[int], salt: str = "") -> Sequence:
    """A sequence whose tokens are all computed and committed."""
    one = sequence(tokens, salt)
    kv.seat(one, kv.match(one, len(tokens) - 1))
    kv.advance(one, len(tokens))
    kv.commit(one, len(tokens))
    return one


def test_a_released_prefix_is_matched_and_revived() -> None:
    kv = allocator()
    first = computed(kv, list(range(10)))
    held = first.kv.table.block_ids
    kv.release(first)
    assert (kv.num_available, kv.num_cached) == (8, 3)
    second = sequence(list(range(10)))
    matched = kv.match(second, 9)
    assert (matched.blocks, matched.tail) == (held[:2], (held[2], 1))
    whole = matched.without_tail(4)
    assert kv.seat_cost(second, whole) == 3
    kv.seat(second, whole)
    assert second.kv.num_computed == 8
    assert (kv.num_available, kv.num_cached) == (5, 1)
    kv.check([second])


def test_blocks_in_use_are_shared_at_no_cost() -> None:
    kv = allocator()
    first = computed(kv, list(range(10)))
    second = sequence(list(range(12)))
    matched = kv.match(second, 11)
    assert kv.seat_cost(second, matched) == 1
    kv.seat(second, matched)
    assert first.kv.table.block_ids[:2] == second.kv.table.block_ids[:2]
    assert not kv.is_writable(second.kv.table.block_ids[0])
    assert kv.is_writable(second.kv.table.block_ids[2])
    kv.check([first, second])


@pytest.mark.parametrize(("limit", "blocks"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_a_match_is_never_longer_than_asked(limit: int, blocks: int) -> None:
    kv = allocator()
    computed(kv, list(range(8)))
    assert len(kv.match(sequence(list(range(8))), limit).blocks) == blocks


def test_only_computed_blocks_are_matched() -> None:
    kv = allocator()
    first = sequence(list(range(8)))
    kv.seat(first, NO_MATCH)
    assert kv.match(sequence(list(range(8))), 7) == NO_MATCH
    kv.advance(first, 7)
    kv.commit(first, 7)
    assert len(kv.match(sequence(list(range(8))), 8).blocks) == 1


def test_salts_do_not_share() -> None:
    kv = allocator()
    computed(kv, list(range(8)), salt="a")
    assert kv.match(sequence(list(range(8)), salt="b"), 8) == NO_MATCH
    assert len(kv.match(sequence(list(range(8)), salt="a"), 8).blocks) == 2


def test_without_caching_nothing_is_matched() -> None:
    kv = allocator(caching=False)
    kv.release(computed(kv, list(range(8))))
    assert kv.match(sequence(list(range(8))), 8) == NO_MATCH
    assert kv.num_cached == 0


def test_eviction_takes_the_least_recent_and_in_it_the_deepest() -> None:
    kv = allocator(num_blocks=5)
    old, new = computed(kv, list(range(8))), computed(kv, list(range(100, 112)))
    kv.release(old)
    kv.release(new)
    kv.seat(sequence([50] * 12), NO_MATCH)
    assert kv.total_kv_evictions == 3
    assert kv.match(sequence(list(range(8))), 8) == NO_MATCH
    assert len(kv.match(sequence(list(range(100, 112))), 12).blocks) == 2, "the shallow part survives"


def test_uncached_blocks_are_reused_before_cached_ones() -> None:
    kv = allocator(num_blocks=4)
    one = sequence(list(range(10)))
    kv.seat(one, NO_MATCH)
    kv.commit(one, 8)
    kv.release(one)
    kv.seat(sequence([50] * 8), NO_MATCH)
    assert kv.total_kv_evictions == 0


def test_fork_shares_everything_and_the_last_owner_writes_in_place() -> None:
    kv = allocator()
    parent = computed(kv, list(range(6)))
    children = [sequence(list(range(6))) for _ in range(2)]
    for child in children:
        kv.fork(parent, child, 6)
    family = [parent, *children]
    assert kv.num_available == 6
    assert sum(unused_slots(family, kv.block_size)) == 2
    tail = parent.kv.table.block_ids[1]
    costs, copies = [], []
    for one in family:
        costs.append(kv.reserve_cost(one, 7))
        copies.append(kv.reserve(one, 7))
    assert costs == [1, 1, 0]
    assert [[source for source, _ in each] for each in copies] == [[tail], [tail], []]
    assert children[1].kv.table.block_ids[1] == tail
    assert len({one.kv.table.block_ids[1] for one in family}) == 3
    kv.check(family)


def test_what_is_reserved_costs_nothing_to_reserve_again() -> None:
    kv = allocator()
    one = computed(kv, list(range(6)))
    assert (kv.reserve_cost(one, 8), kv.reserve_cost(one, 9)) == (0, 1)
    assert kv.num_available == 6, "asking takes nothing"
    assert kv.reserve(one, 9) == ()
    assert (kv.reserve_cost(one, 9), kv.reserve_cost(one, 6), one.kv.num_reserved) == (0, 0, 9)
    assert kv.reserve(one, 7) == ()
    assert (kv.num_available, one.kv.num_reserved) == (5, 9)


def test_fork_at_a_block_boundary_copies_nothing() -> None:
    kv = allocator()
    parent, child = computed(kv, list(range(8))), sequence(list(range(8)))
    kv.fork(parent, child, 8)
    assert kv.reserve(child, 9) == ()
    assert kv.reserve(parent, 9) == ()
    assert parent.kv.table.block_ids[:2] == child.kv.table.block_ids[:2]
    assert parent.kv.table.block_ids[2] != child.kv.table.block_ids[2]


def test_fork_of_a_longer_parent_shares_the_prompt_only() -> None:
    kv = allocator()
    parent, child = sequence(list(range(14))), sequence(list(range(6)))
    kv.seat(parent, NO_MATCH)
    kv.advance(parent, 6)
    kv.commit(parent, 6)
    kv.fork(parent, child, 6)
    assert child.kv.table.block_ids == parent.kv.table.block_ids[:2]
    assert kv.reserve(parent, 14), "the parent writes where the child still reads"
    kv.check([parent, child])


def test_check_sees_a_table_that_lost_a_block() -> None:
    kv = allocator()
    one = computed(kv, list(range(8)))
    one.kv.table.clear()
    with pytest.raises(InvariantViolation, match="has 1 references and is in 0 tables"):
        kv.check([one])


def test_a_block_into_which_nothing_was_copied_is_not_matched() -> None:
    """A group is preempted in the step in which one of its choices was to get its own copy of the last block."""
    kv = allocator()
    first = computed(kv, list(range(7)))
    second = sequence(list(range(7)))
    kv.fork(first, second, 7)
    ((source, target),) = kv.reserve(second, 8)
    kv.cancel_copies([first, second], {target})
    kv.release(first)
    kv.release(second)  # of two that hold as much the last is matched
    matched = kv.match(sequence(list(range(9))), 8)
    assert matched.tail == (source, 3)

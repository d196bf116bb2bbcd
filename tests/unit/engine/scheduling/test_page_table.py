"""Positions to blocks."""

from __future__ import annotations

import pytest

from quire_engine.scheduling.blocks import PageTable


def test_position_37_of_blocks_of_16() -> None:
    assert PageTable(16).position_to_block(37) == (2, 5)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (500, 32)])
def test_num_blocks_for(num_tokens: int, blocks: int) -> None:
    assert PageTable(16).num_blocks_for(num_tokens) == blocks


def test_slots_are_physical() -> None:
    table = PageTable(4)
    table.extend([9, 2])
    assert table.position_to_slot(3) == (9, 3)
    assert table.position_to_slot(4) == (2, 0)
    assert table.num_slots == 8
    assert len(table) == 2
    with pytest.raises(IndexError):
        table.position_to_slot(8)


def test_what_was_given_stays_as_it_was() -> None:
    table = PageTable(4)
    assert table.block_ids == ()
    table.extend([3, 4])
    before = table.block_ids
    table.extend([5])
    longer = table.block_ids
    table.replace(1, 9)
    assert table.block_ids == (3, 9, 5)
    assert table.clear() == (3, 9, 5)
    assert (before, longer, table.block_ids, len(table)) == ((3, 4), (3, 4, 5), (), 0)


def test_an_unchanged_table_is_not_copied_again() -> None:
    table = PageTable(4)
    table.extend(range(1000))
    assert table.block_ids is table.block_ids

"""Prompts that part inside of a block: what they share of it is copied."""

from __future__ import annotations

import pytest

from quire_engine.contract.invariants import InvariantViolation
from quire_engine.scheduling.prefix_cache import Tails
from support.fake_executor import expected_tokens, new_run, outputs_of, own_tokens, produced_alone, request

PARENT = b"before"


def test_the_longest_common_beginning_is_found() -> None:
    tails = Tails(16)
    tails.offer(1, PARENT, [1, 2, 3, 4, 5, 6])
    tails.offer(2, PARENT, [1, 2, 3, 4, 5, 9, 10])
    tails.offer(3, b"another", [1, 2, 3, 4, 5, 6, 7, 8])
    assert tails.longest(PARENT, [1, 2, 3, 4, 5, 6, 7]) == (1, 6)
    assert tails.longest(PARENT, [1, 2, 3, 4, 5, 9]) == (2, 6)
    assert tails.longest(PARENT, [1, 2, 3, 4, 8]) == (2, 4), "of equals the last"
    assert tails.longest(PARENT, [1, 2, 3]) is None, "not worth a copy"
    assert tails.longest(PARENT, [1, 2, 3, 5, 5]) is None
    tails.check()


def test_a_block_is_known_by_what_was_offered_last_and_until_it_is_forgotten() -> None:
    tails = Tails(16)
    tails.offer(1, PARENT, [1, 2, 3, 4, 5])
    tails.offer(1, PARENT, [1, 2, 3, 4, 5, 6])
    assert tails.longest(PARENT, [1, 2, 3, 4, 5, 6, 7]) == (1, 6)
    assert tails.forget(1)
    assert not tails.forget(1)
    assert tails.longest(PARENT, [1, 2, 3, 4]) is None
    tails.check()
    tails.offer(1, PARENT, [1, 2, 3])
    assert not tails.holds(1)


def test_of_many_blocks_with_one_beginning_the_last_are_kept() -> None:
    tails = Tails(16)
    assert [tails.offer(block, PARENT, [1, 2, 3, 4, block]) for block in range(6)] == [None] * 4 + [0, 1]
    assert tails.longest(PARENT, [1, 2, 3, 4, 0]) == (5, 4)
    assert tails.longest(PARENT, [1, 2, 3, 4, 3]) == (3, 5)
    tails.check()
    tails._known.pop(3)
    with pytest.raises(InvariantViolation):
        tails.check()


def test_the_next_turn_finds_the_last_block_of_the_one_before() -> None:
    run = new_run()
    first = request("first", 40, 8)
    run.add(first)
    run.to_end()
    second = request("second", (*first.prompt_token_ids, *expected_tokens(first, 0), *own_tokens("more", 30)), 4)
    run.add(second)
    run.to_end()
    assert outputs_of(run, "second")[0].num_cached_tokens == 47, "all that was computed: not the last token"
    assert produced_alone(run, first, second)


def test_a_prompt_that_parts_inside_of_a_full_block() -> None:
    run = new_run()
    first = request("first", 40, 2)
    second = request("second", (*first.prompt_token_ids[:27], *own_tokens("more", 30)), 4)
    third = request("third", (*first.prompt_token_ids[:19], *own_tokens("other", 30)), 4)
    for one in (first, second, third):
        run.add(one)
        run.to_end()
    assert outputs_of(run, "second")[0].num_cached_tokens == 27
    assert outputs_of(run, "third")[0].num_cached_tokens == 16, "three tokens are not worth a copy"
    assert produced_alone(run, first, second, third)


def test_the_writer_goes_on_in_the_block_that_others_copy() -> None:
    run = new_run()
    first, second = request("first", 40, 30), request("second", (*own_tokens("first", 40), 1, 2, 3), 30)
    run.add(first)
    for _ in range(4):
        run.one_step()
    run.add(second)
    batch = run.one_step()
    assert batch is not None
    assert batch.copies[0][0] == batch.items[0].block_ids[2], "in which the first one writes in this very step"
    assert outputs_of(run, "second")[0].num_cached_tokens == 40
    run.to_end()
    assert produced_alone(run, first, second)


def test_the_source_of_a_copy_is_not_taken_in_its_step() -> None:
    """Four blocks: two of the first prompt, known; the second wants two more. The third would get the one to copy."""
    run = new_run(num_blocks=4, max_model_len=64)
    first = request("first", 24, 1)
    run.add(first)
    run.to_end()
    second, third = request("second", (*first.prompt_token_ids, *own_tokens("x", 20)), 4), request("third", 16, 1)
    run.add(second, third)
    batch = run.one_step()
    assert batch is not None
    assert [(item.start, item.num_tokens) for item in batch.items] == [(24, 20)]
    assert run.scheduler.stats().waiting["kv"] == 1
    ((source, target),) = batch.copies
    assert source not in batch.items[0].block_ids
    assert target == batch.items[0].block_ids[1]
    after = run.one_step()
    assert after is not None
    assert source in {block for item in after.items for block in item.block_ids}, "now it may be taken"
    run.to_end()
    assert produced_alone(run, first, second, third)


def test_a_prompt_that_needs_the_whole_pool_enters_without_a_copy() -> None:
    """The source would be a block too many, for the elder as for any other."""
    run = new_run(num_blocks=4, max_model_len=80)
    first = request("first", 24, 1)
    run.add(first)
    run.to_end()
    second = request("second", (*first.prompt_token_ids, *own_tokens("x", 38)), 2)
    run.add(second)
    run.to_end()
    assert outputs_of(run, "second")[0].num_cached_tokens == 16
    assert produced_alone(run, first, second)


def test_other_salts_share_no_tail() -> None:
    run = new_run()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        run.add(request(name, own_tokens("p", 12), 2, salt=salt))
        run.to_end()
    assert [outputs_of(run, name)[0].num_cached_tokens for name in "abc"] == [0, 0, 11]

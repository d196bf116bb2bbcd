"""Prefixes that are kept for a time: whose, for how long, within which bound, and that nobody waits for them."""

from __future__ import annotations

import dataclasses

from quire_engine.scheduling.block_pool import BlockPool
from support.fake_executor import Run, new_run, outputs_of, own_tokens
from support.fake_executor import request as request_for
from unit.engine.scheduling.test_block_pool import cached

SIZE = 4  # tokens of a block


def pool(num_blocks: int, most: int) -> BlockPool:
    made = BlockPool(num_blocks)
    made.pins.most = most
    return made


def test_a_pinned_block_is_evicted_after_its_owners_others_and_like_them_once_its_time_is_over() -> None:
    made = pool(6, most=2)
    blocks = cached(made, "", 6)
    made.pin(blocks[:2], seconds=10.0)
    assert [made.evict(None)[0] for _ in range(2)] == blocks[2:4]
    made.pins.advance(10.0)
    assert made.evict(None)[0] in blocks[:2]
    made.check()
    assert made.pins.totals() == {"pinned": 2, "refused": 0, "expired": 2, "evicted": 0}


def test_a_pinned_block_makes_way_when_nothing_else_is_left() -> None:
    made = pool(3, most=3)
    blocks = cached(made, "", 3)
    made.pin(blocks, seconds=10.0)
    assert made.num_free == 3, "it counts as available all the time"
    assert [made.evict(None)[0] for _ in range(3)] == blocks
    assert (len(made.pins), made.pins.totals()["evicted"]) == (0, 3)
    made.check()


def test_a_pin_lasts_until_the_latest_end_that_was_asked_for() -> None:
    made = pool(2, most=2)
    blocks = cached(made, "", 2)
    made.pin(blocks[:1], seconds=5.0)
    made.pin(blocks[:1], seconds=60.0)
    made.pin(blocks[:1], seconds=1.0)
    made.pins.advance(30.0)
    assert len(made.pins) == 1
    made.pins.advance(60.0)
    assert len(made.pins) == 0
    assert made.pins.totals()["pinned"] == 1


def test_ends_that_are_moved_again_and_again_take_no_memory() -> None:
    made = pool(4, most=4)
    blocks = cached(made, "", 4)
    for second in range(1000):
        made.pins.advance(float(second))
        made.pin(blocks, seconds=60.0)
    assert len(made.pins._due) < 100
    made.check()
    made.pins.advance(1100.0)
    assert len(made.pins) == 0


def test_each_owner_has_its_part_of_the_share_by_its_weight() -> None:
    made = pool(40, most=8)
    heavy, light = cached(made, "heavy", 20, weight=3.0), cached(made, "light", 20)
    made.pin(light, seconds=10.0)
    assert len(made.pins) == 2
    made.pin(heavy, seconds=10.0)
    assert len(made.pins) == 8
    assert made.pins.totals()["refused"] == 18 + 14
    made.check()


def test_pins_of_one_owner_do_not_take_what_others_are_due() -> None:
    made = pool(16, most=16)
    greedy = cached(made, "greedy", 16)
    made.pin(greedy, seconds=1000.0)
    for _ in range(10):
        cached(made, "other", 4)
    made.check()
    held = {owner.scope: owner.num_held for owner in made.shares._owners.values()}
    assert held == {"greedy": 8, "other": 8}


def hits(run: Run, name: str, ttl: float) -> int:
    """The cached tokens of the prompt of 33 tokens that is asked for again and again."""
    run.add(dataclasses.replace(request_for(name, own_tokens("kept", 33), 2), cache_ttl=ttl))
    run.to_end()
    return outputs_of(run, name)[-1].num_cached_tokens


def flood(run: Run, turn: int, tokens: int = 30) -> None:
    for number in range(20):
        name = f"flood {turn}.{number}"
        run.add(request_for(name, own_tokens(name, tokens), 2))
    run.to_end()


def after_floods(ttl: float, most: int = 10) -> tuple[list[int], Run]:
    run = new_run(num_blocks=40, block_size=SIZE, max_num_seqs=4)
    assert run.scheduler._kv.pins.most == 10, "a quarter"
    run.scheduler._kv.pins.most = most
    found = []
    for turn in range(4):
        found.append(hits(run, f"kept {turn}", ttl))
        flood(run, turn)
    return found, run


def test_a_prompt_is_kept_over_floods_as_long_as_it_asks() -> None:
    assert after_floods(0.0)[0] == [0, 0, 0, 0]
    found, run = after_floods(1e6)
    assert found == [0, 32, 32, 32]
    assert run.scheduler.stats().blocks_pinned == 8
    # Each flood takes more seconds than one; a step takes a second here.
    assert after_floods(1.0)[0] == [0, 0, 0, 0]


def test_without_a_share_nothing_is_pinned_and_a_small_one_keeps_the_beginning() -> None:
    assert after_floods(1e6, most=0)[0] == [0, 0, 0, 0]
    assert after_floods(1e6, most=4)[0] == [0, 16, 16, 16]


def test_a_request_that_needs_the_whole_pool_waits_for_no_pin() -> None:
    run = new_run(num_blocks=16, block_size=SIZE, max_num_seqs=2)
    run.scheduler._kv.pins.most = 16
    hits(run, "kept", 1e6)
    assert run.scheduler.stats().blocks_pinned == 8
    run.add(request_for("large", own_tokens("large", 60), 4))
    steps = len(run.outputs)
    run.to_end()
    assert len(outputs_of(run, "large")) > 0
    assert len(run.outputs) > steps
    assert run.scheduler.stats().blocks_pinned == 0
    assert run.scheduler.stats().total_pins["evicted"] == 8
    assert run.scheduler.stats().total_preemptions == 0

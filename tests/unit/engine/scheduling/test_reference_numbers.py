"""Published numbers on continuous batching and paged KV, out of the real scheduler driven by a fake executor.

F1, F2, F3, F6, F7, F8, F11 and F12 of the scheduler's design.
"""

from __future__ import annotations

import pytest

from quire_engine.scheduling.blocks import PageTable
from support.fake_executor import Run, expected_tokens, new_run, own_tokens, request

LENGTHS = {"a": 32, "b": 128, "c": 64, "d": 256}


def generate(lengths: dict[str, int], arrivals: dict[str, int] | None = None) -> tuple[Run, list[int]]:
    """One prompt token and `lengths` output tokens each; returns the run and the used blocks after each step.

    A request that arrives at step t is first computed in step t + 1. Blocks are counted between `schedule` and
    `apply`, when those of a request that ends in this step are still held.
    """
    run, used = new_run(enable_prefix_caching=False), []
    left = {name: (arrivals or {}).get(name, 0) for name in lengths}
    while left or run.scheduler.has_work:
        for name in [name for name, step in left.items() if step <= run.step]:
            run.add(request(name, 1, lengths[name]))
            del left[name]
        batch = run.scheduler.schedule(float(run.step))
        assert batch is not None
        run.step += 1
        run.log.append(batch)
        used.append(run.scheduler.stats().blocks_used)
        run.take(run.scheduler.apply(batch, run.executor.execute(batch), float(run.step)))
        run.scheduler.check_invariants()
    return run, used


def test_f1_static_slots_waste_more_than_half() -> None:
    run, _ = generate(LENGTHS)
    useful = sum(batch.num_tokens for batch in run.log)
    static = max(len(batch.items) for batch in run.log) * len(run.log)
    assert (useful, static) == (480, 1024)
    assert useful / static == 0.46875


def test_f1_continuous_batching_computes_only_useful_tokens() -> None:
    run, _ = generate(LENGTHS)
    assert all(batch.num_tokens == len(batch.items) for batch in run.log)
    assert sum(len(output.token_ids) for output in run.outputs) == 480


def test_f2_padding_share() -> None:
    run, _ = generate(LENGTHS)
    width = max(len(batch.items) for batch in run.log)
    padding = sum(width - len(batch.items) for batch in run.log)
    assert padding / (width * len(run.log)) == pytest.approx(1 - 480 / (4 * 256))
    assert round(padding / (width * len(run.log)), 3) == 0.531


def test_f3_short_jobs_leave_at_once() -> None:
    run, _ = generate({"a": 10, "b": 50, "c": 100, "d": 200})
    assert run.finish_step == {"a": 10, "b": 50, "c": 100, "d": 200}
    assert sum(batch.num_tokens for batch in run.log) == 360
    assert max(len(batch.items) for batch in run.log) * len(run.log) == 800
    assert len(run.log) == 200


def test_f6_a_long_prompt_takes_four_chunks_and_stops_nobody() -> None:
    run = new_run(
        num_blocks=1024, max_model_len=16384, max_num_batched_tokens=2048 + 64, prefill_chunk=2048, max_num_seqs=64
    )
    streams = [f"s{i}" for i in range(20)]
    run.add(*(request(name, 16, 40) for name in streams))
    for _ in range(3):
        run.one_step()
    run.add(request("long", 8192, 2))
    before = len(run.log)
    run.to_end()
    slices = [
        (step, item.num_tokens)
        for step, batch in enumerate(run.log)
        for item in batch.items
        if item.num_prompt_tokens == 8192 and item.start < 8192
    ]
    assert slices == [(before + k, 2048) for k in range(4)]
    for step, _ in slices:
        decodes = [item for item in run.log[step].items if item.num_prompt_tokens == 16]
        assert len(decodes) == 20
        assert all(item.num_tokens == 1 and item.wants_sample for item in decodes)


def test_f7_position_to_block() -> None:
    table = PageTable(16)
    table.extend([40, 7, 23])
    assert table.position_to_block(37) == (2, 5)
    assert table.position_to_slot(37) == (23, 5)


def test_f8_five_hundred_tokens_leave_twelve_slots() -> None:
    run = new_run()
    run.add(request("r", 500, 2))
    while not run.tokens:
        run.one_step()
    stats = run.scheduler.stats()
    assert stats.blocks_used == 32
    assert stats.slots_allocated == 512
    assert stats.slots_unused == 12


def test_f11_choices_share_the_prompt() -> None:
    run = new_run()
    run.add(request("r", 200, 8, n=16))
    while not run.tokens:
        run.one_step()
    assert run.scheduler.stats().blocks_used == 13
    assert run.scheduler.stats().running == 16
    assert len({tuple(s.kv.table.block_ids) for s in run.scheduler._roster.sequences.values()}) == 1
    separate = new_run(enable_prefix_caching=False, num_blocks=512)
    separate.add(*(request(f"r{i}", own_tokens("system", 200), 8) for i in range(16)))
    while len(separate.tokens) < 16:
        separate.one_step()
    assert separate.scheduler.stats().blocks_used == 208
    run.to_end()
    assert all(tuple(run.tokens["r", c]) == expected_tokens(request("r", 200, 8, n=16), c) for c in range(16))


def test_f11_chats_share_the_system_prompt_by_content() -> None:
    run, system = new_run(), own_tokens("system", 200)
    run.add(request("first", system, 40))
    while not run.tokens:
        run.one_step()
    run.add(*(request(f"r{i}", (*system, 900 + i), 40) for i in range(15)))
    while len(run.tokens) < 16:
        run.one_step()
    tables = [s.kv.table.block_ids for s in run.scheduler._roster.sequences.values()]
    assert len(tables) == 16
    assert len(set.intersection(*map(set, tables))) == 12
    assert len(set().union(*tables)) == 12 + 16 == run.scheduler.stats().blocks_used
    assert run.finishes == {}
    cached = {output.request_id: output.num_cached_tokens for output in run.outputs}
    assert cached == {"first": 0, **{f"r{i}": 200 for i in range(15)}}
    stats = run.scheduler.stats()
    assert (stats.total_prefix_query_tokens, stats.total_prefix_hit_tokens) == (200 + 15 * 201, 15 * 200)


def test_f11_copies_at_the_first_divergent_write() -> None:
    run = new_run()
    run.add(request("r", 200, 8, n=4))
    while not run.tokens:
        run.one_step()
    assert run.scheduler.stats().blocks_used == 13
    shared = run.scheduler._roster.running[0].sequences[0].kv.table.block_ids[12]
    batch = run.one_step()
    assert batch is not None
    assert [source for source, _ in batch.copies] == [shared] * 3
    assert len({target for _, target in batch.copies}) == 3
    assert batch.items[3].block_ids[12] == shared, "the last owner writes in place"
    assert run.scheduler.stats().blocks_used == 16
    after = run.one_step()
    assert after is not None
    assert after.copies == ()


@pytest.mark.parametrize(
    ("arrivals", "steps", "finish", "mean"),
    [
        ({}, 256, {"a": 32, "b": 128, "c": 64, "d": 256}, 11.56),
        ({"b": 2, "c": 4, "d": 6}, 262, {"a": 32, "b": 130, "c": 68, "d": 262}, 11.30),
    ],
)
def test_f12_blocks_grow_with_the_tokens(
    arrivals: dict[str, int], steps: int, finish: dict[str, int], mean: float
) -> None:
    run, used = generate(LENGTHS, arrivals)
    assert len(run.log) == steps
    assert run.finish_step == finish
    assert max(used) == 16
    assert sum(used) / len(used) == pytest.approx(mean, abs=0.01)


def test_f12_thirty_blocks_in_sum_and_sixteen_at_once() -> None:
    run, used = generate(LENGTHS, {"b": 2, "c": 4, "d": 6})
    at_completion: dict[int, int] = {}
    for batch in run.log:
        for item in batch.items:
            at_completion[item.sequence_id] = -(-item.end // 16)
    assert sorted(at_completion.values()) == [2, 4, 8, 16]
    assert sum(at_completion.values()) == 30
    assert len(at_completion) * max(at_completion.values()) == 64, "what static slots would hold"
    assert max(used) == 16
    assert used.index(16) == 118, "steps counted from 0"

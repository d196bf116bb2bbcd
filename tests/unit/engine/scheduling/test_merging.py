"""Full blocks with equal content are held once, wherever their sequences began, and no output changes for it."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.contract.types import GenerationRequest, StepOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, Run, new_run, produced_alone, request
from support.limits import scheduler_config

SIZE = 4
PROMPT = tuple(range(100, 110))  # two full blocks and a half


def copies(
    count: int, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 24, **more: object
) -> list[GenerationRequest]:
    return [request(f"r{number}", prompt, max_tokens, **more) for number in range(count)]


def merging_run(**limits: object) -> Run:
    return new_run(**{"block_size": SIZE, "num_blocks": 60, "min_chunk": 4, **limits})


def side_by_side(run: Run, *wanted: GenerationRequest) -> int:
    """Run them to their ends; returns the most blocks that were used at once."""
    run.add(*wanted)
    most = 0
    while run.scheduler.has_work:
        run.one_step()
        most = max(most, run.scheduler.stats().blocks_used)
    assert produced_alone(run, *wanted)
    assert run.scheduler.stats().blocks_used == 0
    return most


def full_blocks(run: Run) -> list[tuple[int, ...]]:
    """The full, applied blocks of each running sequence."""
    sequences = run.scheduler._roster.sequences.values()
    return [one.kv.table.block_ids[: one.kv.num_certain // SIZE] for one in sequences]


def test_equal_requests_hold_each_full_block_once() -> None:
    """Beside the eight blocks for all, each of the five needs at most a last one, and one that it has just filled."""
    alone = side_by_side(merging_run(), *copies(1))
    run = merging_run()
    run.add(*(wanted := copies(5)))
    while len(run.scheduler._roster.running) < 5 or run.step < 12:
        run.one_step()
    assert len({table[:4] for table in full_blocks(run)}) == 1
    run.to_end()
    assert produced_alone(run, *wanted)
    assert alone == 8
    assert side_by_side(merging_run(), *copies(5)) <= alone + 2 * 4
    assert side_by_side(merging_run(enable_prefix_caching=False), *copies(5)) == 5 * alone


def test_blocks_of_equal_outputs_are_merged_where_the_prompts_were_computed_apart() -> None:
    """Both prompts are computed in one step, so that neither finds the other in the cache."""
    run = merging_run()
    own = (1, 2, 3)  # less than a block: not worth waiting for
    wanted = copies(2, own, 30)
    run.add(*wanted)
    while run.step < 12:
        run.one_step()
    first, second = full_blocks(run)
    common = min(len(first), len(second))
    assert common >= 2
    assert first[:common] == second[:common]
    assert run.scheduler.stats().blocks_saved >= common
    run.to_end()
    assert produced_alone(run, *wanted)


def test_a_merged_block_frees_one_that_is_used_again() -> None:
    """Twelve copies need 108 blocks without merging; the pool has half as many, and none is preempted."""
    run = merging_run(num_blocks=54, enable_prefix_caching=True)
    most = side_by_side(run, *copies(12, (1, 2, 3), 33))
    stats = run.scheduler.stats()
    assert stats.total_preemptions == 0
    assert most < 54
    assert stats.total_blocks_taken > 54, "blocks were taken again"
    apart = merging_run(num_blocks=54, enable_prefix_caching=False)
    side_by_side(apart, *copies(12, (1, 2, 3), 33))
    assert apart.scheduler.stats().total_preemptions > 0


def test_other_salts_are_never_merged() -> None:
    run = merging_run()
    wanted = [dataclasses.replace(one, cache_salt=f"s{number}") for number, one in enumerate(copies(2))]
    run.add(*wanted)
    while run.scheduler.has_work:
        run.one_step()
        tables = [set(one.kv.table.block_ids) for one in run.scheduler._roster.sequences.values()]
        assert len(tables) < 2 or not set.intersection(*tables)
        assert run.scheduler.stats().blocks_saved == 0
    assert produced_alone(run, *wanted)
    assert run.scheduler._kv.merged_share == 0.0


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 20},
        {"num_blocks": 20, "num_host_blocks": 40},
        {"num_blocks": 20, "num_host_blocks": 6},
        {"num_blocks": 20, "preemption_victim": "least-lost", "admission": "expected", "scheduling_policy": "wfq"},
        {"prefill_chunk": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_preempted_and_swapped_sequences_merge_too(limits: dict[str, object], n: int) -> None:
    run = merging_run(**limits)
    wanted = [
        *copies(3, (1, 2, 3), 20 if n == 3 else 60, n=n),
        request("other", 9, 16, n=n),
        dataclasses.replace(request("late", (1, 2, 3), 20), arrival_time=1.0),
    ]
    side_by_side(run, *wanted)
    assert run.scheduler._kv.merged_share > 0
    if limits.get("num_blocks") == 14 and n == 3:
        assert run.scheduler.stats().total_preemptions > 0


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(60, 0), (16, 0), (16, 30)])
@pytest.mark.parametrize("n", [1, 2])
def test_blocks_are_merged_while_a_step_that_reads_them_is_in_flight(
    num_blocks: int, num_host_blocks: int, n: int
) -> None:
    config = scheduler_config(
        num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=SIZE, min_chunk=4, plans_ahead=True
    )
    executor = FakeExecutor(SIZE, max_in_flight=2)
    run = Run(scheduler=Scheduler(config), executor=executor)
    engine = Engine(run.scheduler, executor, check_invariants=True, clock=lambda: 0.0)
    most_saved = 0

    def take(step: StepOutput) -> None:
        nonlocal most_saved
        run.take(list(step.outputs))
        most_saved = max(most_saved, step.stats.blocks_saved)

    engine.on_step = take
    wanted = copies(4, (1, 2, 3), 24, n=n, penalty=0.0)
    for one in wanted:
        engine.submit(one)
    while engine.has_work:
        engine.step()
    assert produced_alone(run, *wanted)
    assert most_saved > 0
    assert run.scheduler.stats().blocks_used == 0


def test_choices_of_equal_requests_are_merged_choice_by_choice() -> None:
    """Two requests with three choices each: the choices differ, and each has its twin in the other request."""
    run = merging_run()
    wanted = copies(2, (1, 2, 3), 30, n=3)
    run.add(*wanted)
    while run.step < 20:
        run.one_step()
    by_choice: dict[int, set[tuple[int, ...]]] = {}
    for one in run.scheduler._roster.sequences.values():
        by_choice.setdefault(one.choice, set()).add(one.kv.table.block_ids[:4])
    assert [len(tables) for tables in by_choice.values()] == [1, 1, 1]
    assert len(set.union(*by_choice.values())) == 3
    run.to_end()
    assert produced_alone(run, *wanted)


def test_the_merged_share_follows_the_outputs_last_blocks() -> None:
    run = merging_run(num_blocks=600, max_num_seqs=8)
    shares = []
    for wanted in (copies(8, (1, 2, 3), 120), [request(f"own{number}", 3, 120) for number in range(8)]):
        side_by_side(run, *wanted)
        shares.append(run.scheduler._kv.merged_share)
    assert shares[0] > 0.7
    assert shares[1] < 0.1


def test_a_block_of_the_prompt_does_not_count_as_output() -> None:
    run = merging_run()
    side_by_side(run, *copies(4, max_tokens=1))
    assert run.scheduler._kv.merged_share == 0.0

"""Requests that arrive together with one prefix: it is computed once, and nobody waits for what nobody computes."""

from __future__ import annotations

import pytest

from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.contract.types import GenerationRequest, StepOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, Run, new_run, outputs_of, own_tokens, produced_alone, request
from support.limits import scheduler_config

SYSTEM = own_tokens("system", 200)


def chats(count: int, *, own: int = 6, max_tokens: int = 8, **more: object) -> list[GenerationRequest]:
    """With one system prompt and messages of their own."""
    return [request(f"c{i}", (*SYSTEM, *own_tokens(f"m{i}", own)), max_tokens, **more) for i in range(count)]


def computed(run: Run) -> int:
    return sum(batch.num_tokens - batch.num_decodes for batch in run.log)


def waits(run: Run) -> int:
    return run.scheduler.stats().waiting["prefix"]


def test_f11_sixteen_cold_chats_compute_the_system_prompt_once() -> None:
    run, wanted = new_run(), chats(16)
    run.add(*wanted)
    first = run.one_step()
    assert first is not None
    assert [item.num_tokens for item in first.items] == [206]
    assert waits(run) == 15
    second = run.one_step()
    assert second is not None
    assert [(item.start, item.end) for item in second.items] == [(206, 207), *[(200, 206)] * 15]
    stats = run.scheduler.stats()
    assert (stats.blocks_shared, stats.blocks_unshared, stats.blocks_saved) == (12, 16, 15 * 12)
    assert stats.blocks_used == 28, "208 without sharing"
    sources = {source for source, _ in second.copies}
    assert (len(second.copies), len(sources)) == (15, 1), "of the thirteenth block everyone gets a copy"
    assert stats.total_prefill_tokens_saved == stats.total_prefix_hit_tokens == 15 * 200
    run.to_end()
    assert computed(run) == 200 + 16 * 6
    assert produced_alone(run, *wanted)


def test_chats_of_a_chunked_prompt_wait_for_all_of_it() -> None:
    run, wanted = new_run(prefill_chunk=48), chats(4)
    run.add(*wanted)
    for _ in range(4):
        run.one_step()
        assert waits(run) == 3
    run.to_end()
    assert computed(run) == 200 + 4 * 6
    assert produced_alone(run, *wanted)


def test_identical_prompts_compute_one_token_each() -> None:
    run = new_run()
    run.add(*(request(f"r{i}", SYSTEM, 4) for i in range(5)))
    run.to_end()
    assert computed(run) == 200 + 4


@pytest.mark.parametrize("end", ["abort", "fail", "error"])
def test_if_the_provider_ends_another_takes_its_place(end: str) -> None:
    run, wanted = new_run(prefill_chunk=48, elder_age_steps=1000), chats(4)
    run.add(*wanted)
    run.one_step()
    if end == "abort":
        run.scheduler.abort("c0")
    elif end == "fail":
        run.scheduler.fail("c0", "out of luck")
    else:
        run.executor.errors[0] = "the model failed"
        run.one_step()
    batch = run.one_step()
    assert batch is not None
    assert [item.sequence_id for item in batch.items] == [1]
    assert waits(run) == 2
    for _ in range(5):
        run.one_step()
    assert waits(run) == 0, "they wait for the new provider alone, and enter together"
    run.to_end()
    assert produced_alone(run, *wanted[1:])


def test_if_the_provider_is_preempted_the_prefix_is_still_computed_once() -> None:
    """`first` grows into the last free block, and the one who computes the prefix is the youngest who runs."""
    run = new_run(num_blocks=19, prefill_chunk=48)
    first, wanted = request("first", 95, 60), chats(3, max_tokens=2)
    run.add(first)
    run.one_step()
    run.one_step()
    run.add(*wanted)
    run.to_end()
    assert run.scheduler.stats().total_preemptions > 0
    assert produced_alone(run, first, *wanted)
    assert any(output.num_cached_tokens >= 192 for output in outputs_of(run, "c2"))


def test_other_salts_and_scored_prompts_do_not_wait() -> None:
    run = new_run(num_blocks=512, max_num_batched_tokens=2048)
    wanted = [
        request("a", SYSTEM, 4),
        request("b", SYSTEM, 4, salt="other"),
        request("c", SYSTEM, 4, prompt_logprobs=1),
        request("d", SYSTEM, 4, n=3),
    ]
    run.add(*wanted)
    first = run.one_step()
    assert first is not None
    assert [item.sequence_id for item in first.items] == [0, 1, 2]
    assert waits(run) == 3, "the three choices of d"
    run.to_end()
    assert produced_alone(run, *wanted)


@pytest.mark.parametrize(("common", "together"), [(16, False), (15, False), (8, False), (7, True), (2, True)])
def test_less_than_half_a_block_is_not_waited_for(common: int, together: bool) -> None:
    run = new_run()
    run.add(*(request(f"r{i}", (*SYSTEM[:common], *own_tokens(f"m{i}", 40)), 4) for i in range(2)))
    first = run.one_step()
    assert first is not None
    assert (len(first.items) == 2) == together


def test_those_who_wait_for_a_prefix_stand_in_nobodys_way() -> None:
    """A blocked head lets nobody pass here; that a prefix is waited for is no such block, and is not counted."""
    run = new_run(max_bypasses=0, prefill_chunk=48)
    late = request("late", 20, 4)
    run.add(*chats(3), late)
    first = run.one_step()
    assert first is not None
    assert [item.num_tokens for item in first.items] == [48, 20]
    assert [group.num_bypasses for group in run.scheduler._roster.waiting] == [0, 0]


def test_the_elder_is_never_made_to_wait() -> None:
    run = new_run(num_blocks=512, scheduling_policy="priority", max_num_seqs=1, prefill_chunk=16, min_chunk=16)
    old = request("old", (*SYSTEM, 1), 4, priority=9)
    run.add(request("x", 20, 3), old)
    run.one_step()
    run.add(request("young", (*SYSTEM, 2), 4))
    while run.scheduler.has_work:
        run.one_step()
        elder = run.scheduler._planner.elder
        assert elder is not None
        assert elder.state in {"running", "finished"}


def test_a_plan_ahead_waits_for_the_result() -> None:
    """What is in flight may fail: its blocks can be matched when it has not."""
    limits = scheduler_config(num_blocks=256, plans_ahead=True, itl_target=0.0)
    executor = FakeExecutor(limits.limits.block_size, max_in_flight=2)
    run = Run(scheduler=Scheduler(limits), executor=executor)
    engine = Engine(run.scheduler, executor, check_invariants=True, clock=lambda: 0.0)

    def take(step: StepOutput) -> None:
        run.take(list(step.outputs))

    engine.on_step = take
    wanted = chats(6, penalty=0.0)
    for one in wanted:
        engine.submit(one)
    engine.step()
    engine.step()
    assert [len(batch.items) for batch in executor.log] == [1, 1], "the first goes on, and nobody enters yet"
    while engine.has_work:
        engine.step()
    assert produced_alone(run, *wanted)
    assert sum(batch.num_tokens - batch.num_decodes for batch in executor.log) == 200 + 6 * 6


def test_a_thousand_who_wait_are_not_looked_up_again() -> None:
    """Once found waiting, a group costs one look at what it waits for."""
    run = new_run(num_blocks=2048, prefill_chunk=32, check=False)
    run.add(*chats(1000, max_tokens=1))
    run.one_step()
    kv, looked_up = run.scheduler._kv, 0
    match = kv.match

    def counted(*args: object) -> object:
        nonlocal looked_up
        looked_up += 1
        return match(*args)  # type: ignore[arg-type]

    kv.match = counted  # type: ignore[method-assign,assignment]
    run.one_step()
    assert looked_up == 0
    assert waits(run) == 999


def test_no_promise_outlives_its_sequence() -> None:
    run = new_run(prefill_chunk=48)
    run.add(*chats(3))
    run.one_step()
    assert run.scheduler._kv._promises
    for name in ("c0", "c1", "c2"):
        run.scheduler.abort(name)
    promises = run.scheduler._kv._promises
    assert not promises
    assert not promises._by_content


def test_without_a_cache_nobody_waits() -> None:
    run = Run(
        scheduler=Scheduler(SchedulerConfig(num_blocks=512, limits=SchedulerLimits(enable_prefix_caching=False))),
        executor=FakeExecutor(16),
    )
    run.add(*chats(2))
    first = run.one_step()
    assert first is not None
    assert len(first.items) == 2

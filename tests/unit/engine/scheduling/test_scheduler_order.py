"""Who enters and when, and what a step takes: the elder, priorities, reasons to wait, long prompts beside streams."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.scheduling.policies import FEWEST
from support.fake_executor import expected_tokens, new_run, request


def test_the_elder_is_kept_until_it_ends_though_another_is_overdue() -> None:
    run = new_run(elder_age_steps=2)
    run.add(request("old", 8, 60), request("short", 8, 12))
    planner = run.scheduler._planner
    for _ in range(10):
        run.one_step()
        assert planner.elder is not None
        assert planner.elder.request.request_id == "old"
    run.add(request("later", 8, 4), request("last", 8, 60))
    run.scheduler.abort("old")
    run.one_step()
    assert planner.elder.request.request_id == "short", "the next is the oldest that is left"
    run.to_end()


def test_asking_whether_a_group_can_enter_does_not_change_it() -> None:
    run = new_run(num_blocks=4)
    run.add(request("holder", 40, 8), request("family", 40, 8, n=2), request("other", 40, 8))
    for _ in range(3):
        run.one_step()
        for group in run.scheduler._roster.waiting:
            assert group.wait_reason == "kv"
            assert (group.state, group.computing, group.prompt_shared) == ("waiting", [], len(group.sequences) == 1)


def test_priority_goes_first_and_equal_ones_in_order() -> None:
    run = new_run(max_num_seqs=1, scheduling_policy="priority", elder_age_steps=1000)
    run.add(request("old", 8, 3, priority=5))
    run.one_step()
    run.add(*(request(name, 8, 3, priority=p) for name, p in [("late", 1), ("b", 0), ("c", 0)]))
    run.to_end()
    assert sorted(run.finish_step, key=lambda name: run.finish_step[name]) == ["old", "late", "b", "c"], "elder first"
    assert run.finish_step["b"] < run.finish_step["c"]


def test_waiting_is_counted_by_reason() -> None:
    slots = new_run(max_num_seqs=2)
    slots.add(*(request(f"r{i}", 8, 8, n=2 if i else 1) for i in range(3)))
    slots.one_step()
    assert slots.scheduler.stats().waiting == {"kv": 0, "slots": 4, "budget": 0, "prefix": 0}
    blocks = new_run(num_blocks=4)
    blocks.add(request("a", 40, 8), request("b", 40, 8))
    blocks.one_step()
    assert blocks.scheduler.stats().waiting == {"kv": 1, "slots": 0, "budget": 0, "prefix": 0}
    budget = new_run(max_num_batched_tokens=80, prefill_chunk=80)
    budget.add(request("a", 80, 8), request("b", 40, 8))
    budget.one_step()
    assert budget.scheduler.stats().waiting == {"kv": 0, "slots": 0, "budget": 1, "prefix": 0}


def test_nobody_enters_for_a_sliver_of_the_budget() -> None:
    run = new_run(max_num_batched_tokens=80, prefill_chunk=70)
    run.add(request("a", 70, 4), request("b", 40, 4), request("c", 8, 4))
    batch = run.one_step()
    assert batch is not None
    assert [(item.num_prompt_tokens, item.num_tokens) for item in batch.items] == [(70, 70), (8, 8)]


def test_a_family_enters_with_room_for_all_its_choices() -> None:
    run = new_run(num_blocks=10)
    run.add(request("holder", 90, 4), request("family", 20, 4, n=4))
    run.one_step()
    assert run.scheduler.stats().waiting["kv"] == 4, "2 blocks of prompt and 3 copies, 4 are available"
    run.to_end()
    assert run.scheduler.stats().total_preemptions == 0


def test_partial_prefills_are_capped_and_short_prompts_pass() -> None:
    run = new_run(max_num_batched_tokens=400, prefill_chunk=32, num_blocks=512)
    run.add(*(request(f"long{i}", 300, 2) for i in range(4)), *(request(f"short{i}", 20, 2) for i in range(3)))
    batch = run.one_step()
    assert batch is not None
    assert [(item.num_prompt_tokens, item.num_tokens) for item in batch.items] == [(300, 32)] * 3 + [(20, 20)] * 3, (
        "the elder and two more, then the short ones"
    )
    run.to_end()


def test_streams_do_not_wait_for_a_long_prompt() -> None:
    run = new_run(num_blocks=512, prefill_chunk=512, itl_target=0.1)
    run.add(request("stream", 16, 100))
    now, seconds = 0.0, {}
    while run.scheduler.has_work:
        if len(seconds) == 5:
            run.add(request("long", 2000, 2))
        batch = run.scheduler.schedule(now)
        assert batch is not None
        seconds[batch.step_id] = 0.01 + 0.0005 * batch.num_tokens
        now += seconds[batch.step_id]
        run.take(run.scheduler.apply(batch, run.executor.execute(batch), now))
        run.log.append(batch)
    mixed = [batch for batch in run.log if len(batch.items) == 2 and batch.num_tokens > 2]
    assert mixed[0].num_tokens == 512, "what a step takes is not known before the first"
    assert [batch.num_tokens for batch in mixed[1:5]] == pytest.approx([180] * 4, abs=15)
    assert all(0.08 < seconds[batch.step_id] < 0.11 for batch in mixed[1:-1])


@pytest.mark.parametrize(
    ("streams", "sizes"),
    [([], [512]), (["stream"], [51, *[1 + FEWEST] * 7])],
    ids=["alone", "beside a stream, half of the fewest tokens a step"],
)
def test_short_prompts_do_not_wait_for_a_long_one(streams: list[str], sizes: list[int]) -> None:
    run = new_run(num_blocks=1024, max_model_len=8192, prefill_chunk=512, itl_target=0.1)
    run.add(*(request(name, 16, 400) for name in streams))
    run.one_step()
    run.add(request("long", 6000, 2))
    run.one_step()
    began = len(run.log)
    run.add(*(request(f"short{i}", 40, 1) for i in range(3)))
    while not all(f"short{i}" in run.finish_step for i in range(3)):
        run.one_step()
    assert [batch.num_tokens for batch in run.log[began:]] == sizes, "and no room is left"


def test_a_resumed_stream_computes_what_it_knows_in_whole_steps() -> None:
    run = new_run(num_blocks=512, prefill_chunk=512, itl_target=0.1)
    run.add(request("before", 40, 1))
    run.to_end()
    wanted = request("r", 1000, 30)
    run.add(dataclasses.replace(wanted, resumed_token_ids=(tuple(expected_tokens(wanted, 0)[:24]),)))
    run.to_end()
    assert [batch.num_tokens for batch in run.log[1:4]] == [512, 512, 1], "nobody gets a token meanwhile"


def test_a_prompt_alone_takes_the_whole_step() -> None:
    run = new_run(num_blocks=512, prefill_chunk=512, itl_target=0.1)
    run.add(request("long", 2000, 2))
    run.to_end()
    assert [batch.num_tokens for batch in run.log] == [512, 512, 512, 464, 1]


def test_resumed_output_counts_as_an_unfinished_prefill() -> None:
    run = new_run(max_num_partial_prefills=1)
    whole = [request(name, 8, 60, n=2) for name in "ab"]
    run.add(request("elder", 8, 60))
    run.one_step()
    run.add(
        *(
            dataclasses.replace(one, resumed_token_ids=tuple(expected_tokens(one, choice)[:40] for choice in (0, 1)))
            for one in whole
        )
    )
    run.one_step()
    assert (run.scheduler.stats().running, run.scheduler.stats().waiting["budget"]) == (3, 2)
    run.to_end()


def test_a_blocked_head_is_overtaken_a_bounded_number_of_times() -> None:
    run = new_run(num_blocks=12, max_bypasses=3, max_num_seqs=8, elder_age_steps=10_000)
    run.add(request("holder", 16, 100))
    run.one_step()
    run.add(request("head", 170, 8), *(request(f"small{i}", 16, 4) for i in range(6)))
    run.to_end()
    earlier = [name for name, step in run.finish_step.items() if step < run.finish_step["head"] and "small" in name]
    assert sorted(earlier) == ["small0", "small1", "small2"]


def test_the_bound_is_printed_while_the_request_lives() -> None:
    run = new_run()
    run.add(request("a", 16, 8), request("b", 16, 8))
    assert run.scheduler.wait_bound("a") < run.scheduler.wait_bound("b")
    run.to_end()
    with pytest.raises(KeyError):
        run.scheduler.wait_bound("a")

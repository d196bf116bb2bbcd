"""What the step log says of requests whose schedule is known: when they end, in how many slices, why they waited."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from quire_engine.contract.types import HoldReason, StepOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, Run, new_run, request
from support.limits import scheduler_config


def steps(run: Run) -> list[Any]:
    answer = run.scheduler.answer("steps", {"limit": 256})
    assert isinstance(answer, dict)
    return list(answer["steps"])


def told(run: Run | Scheduler, name: str) -> dict[str, Any]:
    scheduler = run.scheduler if isinstance(run, Run) else run
    answer = scheduler.answer("request", {"ids": [name]})
    assert isinstance(answer, dict)
    (one,) = answer["requests"]
    return dict(one)


def spent(one: dict[str, Any], part: str = "spent") -> dict[tuple[str, str], int]:
    return {(each["phase"], each["reason"]): each["steps"] for each in one[part]}


def test_each_leaves_at_the_step_that_its_length_says() -> None:
    """F3: a static batch would hold all four for 200 steps."""
    run = new_run()
    run.add(*(request(f"r{length}", 4, length) for length in (10, 50, 100, 200)))
    run.to_end()
    ends = [(step.step_id, *end) for step in steps(run) for end in step.ends]
    assert ends == [(length, f"r{length}", 0, "length", length) for length in (10, 50, 100, 200)]
    assert [told(run, f"r{length}")["last_step"] for length in (10, 50, 100, 200)] == [10, 50, 100, 200]
    assert sum(len(step.slices) for step in steps(run)) == 360


def test_a_long_prompt_is_four_slices_and_streams_go_on_in_each() -> None:
    """F6."""
    run = new_run(
        num_blocks=1024, max_model_len=8300, prefill_chunk=2048, max_num_batched_tokens=2048 + 16, max_num_seqs=8
    )
    run.add(*(request(f"s{i}", 4, 20) for i in range(3)))
    run.one_step()
    run.add(request("long", 8192, 2))
    run.to_end()
    of_long = [(step, size) for step in steps(run) for name, _, _, size in step.slices if name == "long" and size > 1]
    assert [size for _, size in of_long] == [2048] * 4
    for step, _ in of_long:
        assert [each for each in step.slices if each[3] == 1 and each[0] != "long"] == [
            (f"s{i}", 0, 4 + step.step_id - 2, 1) for i in range(3)
        ]
    one = told(run, "long")
    assert [(each["step"], each["start"], each["num_tokens"]) for each in one["chunks"]] == [
        (2 + i, 2048 * i, 2048) for i in range(4)
    ]
    assert spent(one, "before_first_token") == {("prefill", ""): 4}
    assert told(run, "s0")["decode_beside_prompts"] == {"steps": 4, "prompt_tokens": 8192, "seconds": 4.0}


def test_the_rank_that_others_wait_for_is_named() -> None:
    run = new_run()
    run.add(request("before", 4, 3))
    run.to_end()
    assert told(run, "before")["rank_seconds"] == []
    assert "rank" not in told(run, "before")["why"]
    run.executor.rank_seconds = (0.25, 0.0, 0.5)  # of steps of one second each
    run.add(request("after", 4, 4))
    run.to_end()
    one = told(run, "after")
    assert one["rank_seconds"] == [1.0, 0.0, 2.0]
    assert one["why"].endswith(
        "; rank 1 waited least, so it is the slow one: something else runs on its cores, or it has fewer."
    )
    assert " In 2.000 s of the 4.000 s that its steps took " in one["why"]
    run.executor.rank_seconds = (0.25, 0.125, 0.125)
    run.add(request("even", 4, 4))
    run.to_end()
    assert told(run, "even")["rank_seconds"] == [1.0, 0.5, 0.5]
    assert "rank" not in told(run, "even")["why"]
    assert [step.rank_seconds for step in steps(run)[-2:]] == [(0.25, 0.125, 0.125)] * 2


def test_the_parts_of_the_time_to_the_first_token_are_all_of_it() -> None:
    """F5, against what the request's timing says."""
    dice, now = random.Random(1), [50.0]

    def clock() -> float:
        now[0] += dice.random() / 50
        return now[0]

    config = scheduler_config(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=64, itl_target=0.0)
    scheduler, heard = Scheduler(config), dict[str, StepOutput]()
    engine = Engine(scheduler, FakeExecutor(16), clock=clock)

    def take(step: StepOutput) -> None:
        for output in step.outputs:
            heard.setdefault(output.request_id, step)

    engine.on_step = take
    for i in range(5):
        engine.submit(request(f"r{i}", 100, 3, arrival=now[0] - 0.01))
    while engine.has_work:
        engine.step()
    for name, step in heard.items():
        (timing,) = [output.timing for output in step.outputs if output.request_id == name]
        one = told(scheduler, name)
        assert timing is not None
        assert one["ttft_seconds"] == pytest.approx(timing.queue_seconds + timing.prefill_seconds, abs=1e-9)
        waited = sum(each["seconds"] for each in one["before_first_token"] if each["phase"] in {"transit", "queue"})
        assert waited == pytest.approx(timing.queue_seconds, abs=1e-9)
        assert sum(each["seconds"] for each in one["before_first_token"]) == pytest.approx(one["ttft_seconds"])


def test_why_it_waits_is_told_by_reason() -> None:
    run = new_run(max_num_seqs=1, max_num_batched_tokens=64, num_blocks=8)
    run.add(request("a", 20, 6), request("b", 10, 2))
    run.to_end()
    one = told(run, "b")
    assert spent(one) == {("queue", "slots"): 6, ("prefill", ""): 1, ("decode", ""): 1}
    assert one["why"].startswith("It took")
    assert "--max-num-seqs" in one["why"]
    first = steps(run)[0]
    assert [(each.kind, each.request_id, each.reason) for each in first.decisions][-1] == ("waits", "b", "slots")


def test_the_first_reason_is_told_even_where_it_is_what_is_taken_for_granted() -> None:
    run = new_run(max_num_seqs=8, max_num_batched_tokens=32, prefill_chunk=32)
    run.add(request("a", 32, 2), request("b", 32, 2))
    run.one_step()
    (step,) = steps(run)
    assert ("waits", "b", "budget") in [(each.kind, each.request_id, each.reason) for each in step.decisions]


def test_who_is_preempted_has_it_and_its_stall_told() -> None:
    """Two grow until one has to go; it comes back when the other has ended, and is computed again."""
    small = {"num_blocks": 8, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "min_chunk": 4}
    run = new_run(enable_prefix_caching=False, **small)
    run.add(request("old", 12, 12), request("young", 12, 12))
    run.to_end()
    one, other = told(run, "young"), told(run, "old")
    (preemption,) = one["preemptions"]
    (stall,) = one["stalls"]
    assert (preemption["cause"], preemption["mode"]) == ("elder", "recompute")
    assert (stall["first_step"], other["last_step"]) == (preemption["step"], 12)
    assert stall["last_step"] == 12
    parts = spent(one)
    assert parts["preempted", "kv"] == 13 - preemption["step"]
    assert parts["recompute", ""] == 1
    assert one["num_chunks"] == 2
    assert "preempted 1 times, for old (1)" in one["why"]
    assert preemption["by"] == "old"
    (taker,) = one["took_blocks"]
    assert (taker["request_id"], taker["preemptions"]) == ("old", 1)
    assert taker["tokens"] == 12 + preemption["step"] - 1, "old's tokens in the step in which young began to wait"
    assert other["preemptions"] == other["took_blocks"] == []
    by_cause = run.scheduler.stats().total_preemptions_by_cause
    assert {cause: count for cause, count in by_cause.items() if count} == {"elder": 1}


def test_the_requests_that_hold_the_blocks_it_waits_for_are_named() -> None:
    """Seven of eight blocks are held; the third prompt needs three."""
    run = new_run(num_blocks=8, block_size=4, max_num_batched_tokens=64, max_num_seqs=8, min_chunk=4)
    run.add(request("large", 15, 2), request("small", 8, 6))
    run.one_step()
    run.add(request("late", 12, 2))
    run.to_end()
    one = told(run, "late")
    assert one["preemptions"] == []
    assert [(each["request_id"], each["tokens"]) for each in one["took_blocks"]] == [("large", 16), ("small", 9)]
    assert "; the blocks it lacked were held by large (16 tokens), small (9 tokens)." in one["why"]


def test_every_preemption_that_the_planner_makes_for_another_names_it() -> None:
    """Requests that grow, beside an elder and interactive ones: a beneficiary is live and another request."""
    small = {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 4, "min_chunk": 4}
    run = new_run(enable_prefix_caching=False, **small)
    run.add(*(replace(request(f"b{i}", 8, 14), service_class="batch") for i in range(3)))
    run.one_step()
    run.add(*(request(f"i{i}", 8, 14) for i in range(4)))
    run.to_end()
    preempted = [each for step in steps(run) for each in step.decisions if each.kind == "preempted"]
    by_cause = run.scheduler.stats().total_preemptions_by_cause
    assert Counter(each.reason for each in preempted) == {cause: n for cause, n in by_cause.items() if n}
    assert by_cause["class"] > 0
    assert by_cause["blocks"] + by_cause["elder"] > 0
    assert all(each.by != each.request_id for each in preempted)
    assert all(each.by.startswith("i") for each in preempted if each.reason == "class")
    assert all(each.by for each in preempted if each.reason != "blocks")


def test_cached_tokens_are_told_with_the_decision_and_the_life() -> None:
    run = new_run()
    run.add(request("a", tuple(range(40)), 2))
    run.to_end()
    run.add(request("b", (*range(40), 99), 2))
    run.to_end()
    assert told(run, "b")["cached_tokens"] == 40
    (enters,) = [
        each for step in steps(run) for each in step.decisions if (each.kind, each.request_id) == ("enters", "b")
    ]
    assert enters.num_tokens == 40


def test_choices_are_told_apart_and_copies_too() -> None:
    run = new_run(block_size=4)
    run.add(request("a", 6, 3, n=3))
    run.to_end()
    first, second, *_ = steps(run)
    assert first.slices == (("a", 0, 0, 6),)
    assert second.slices == (("a", 0, 6, 1), ("a", 1, 6, 1), ("a", 2, 6, 1))
    assert len(second.copies) == 2
    one = told(run, "a")
    assert one["finish"] == {"0": "length", "1": "length", "2": "length"}
    assert (one["output_tokens"], one["choices"]) == (9, 3)


def test_an_abort_ends_a_life_and_a_running_one_is_told_so_far() -> None:
    run = new_run()
    run.add(request("a", 20, 9), request("b", 20, 9))
    run.one_step()
    run.one_step()
    run.scheduler.abort("a")
    assert told(run, "a")["finish"] == {"0": "abort"}
    assert told(run, "a")["output_tokens"] == 2
    going = told(run, "b")
    assert (going["state"], going["output_tokens"], going["last_step"]) == ("decode", 2, None)
    assert going["why"].startswith("It has taken")
    run.to_end()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.scheduling.log.step_log.MOST_FINISHED", 3)
    run = new_run(step_log=5)
    for i in range(20):
        run.add(request(f"r{i}", 4, 3))
        run.to_end()
    log = run.scheduler._log
    assert log is not None
    answer = run.scheduler.answer("requests", {})
    assert isinstance(answer, dict)
    assert [each["request_id"] for each in answer["ended"]] == ["r19", "r18", "r17"]
    assert [step.step_id for step in steps(run)] == [56, 57, 58, 59, 60]
    assert len(log._names) <= 3
    assert len(log.events) <= 6
    assert not log._life_of


def test_the_log_changes_no_plan() -> None:
    """I10: with and without it."""
    logs = []
    for size in (0, 3, 4096):
        run = new_run(
            step_log=size, num_blocks=20, block_size=4, max_num_batched_tokens=40, max_num_seqs=8, min_chunk=4
        )
        run.add(*(request(f"r{i}", 5 + 3 * i, 4 + i, n=1 + i % 2) for i in range(6)))
        run.to_end()
        logs.append(run.log)
    assert logs[0] == logs[1] == logs[2]


def test_a_decode_that_is_planned_ahead_is_no_slice_of_the_prompt() -> None:
    config = scheduler_config(num_blocks=64, max_num_batched_tokens=128, plans_ahead=True)
    scheduler = Scheduler(config)
    engine = Engine(scheduler, FakeExecutor(16, max_in_flight=2))
    engine.submit(request("a", 100, 4, penalty=0.0))
    while engine.has_work:
        engine.step()
    one = told(scheduler, "a")
    assert [(each["start"], each["num_tokens"]) for each in one["chunks"]] == [(0, 100)]
    assert {phase: number for (phase, _), number in spent(one).items() if number} == {"prefill": 1, "decode": 3}


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_each_step_is_reported_once(max_in_flight: int) -> None:
    """A step that begins while none has ended has only the numbers of an earlier one."""
    ticks = itertools.count()
    executor = FakeExecutor(16, max_in_flight=max_in_flight)
    ahead = {"plans_ahead": max_in_flight > 1}
    engine = Engine(Scheduler(scheduler_config(num_blocks=64, **ahead)), executor, clock=lambda: float(next(ticks)))
    reported: list[StepOutput] = []
    engine.on_step = reported.append
    for number in range(3):  # an idle engine begins anew
        engine.submit(request(f"r{number}", 20, 3 + number, penalty=0.0))
        while engine.has_work:
            engine.step()
    ended = [each.step_id for each in reported if each.stats.step_seconds > each.stats.host_seconds]
    assert ended == [batch.step_id for batch in executor.log]


def test_how_a_preempted_one_comes_back_is_told() -> None:
    small = {"num_blocks": 8, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "min_chunk": 4}
    run = new_run(num_host_blocks=16, **small)
    run.add(request("old", 12, 12), request("young", 12, 12))
    run.to_end()
    (preemption,) = told(run, "young")["preemptions"]
    assert preemption["mode"] == "swap"
    assert sum(step.swaps[0] for step in steps(run)) > 0


def test_a_short_log_knows_who_ended_beside_the_step_in_flight() -> None:
    config = scheduler_config(num_blocks=64, max_num_batched_tokens=128, plans_ahead=True, step_log=2)
    scheduler = Scheduler(config)
    executor = FakeExecutor(16, max_in_flight=2)
    engine = Engine(scheduler, executor)
    seen = []
    engine.submit(request("a", 20, 12, penalty=0.0, stop=tuple(range(0, 1000, 2))))
    engine.submit(request("b", 20, 24, penalty=0.0))
    while engine.has_work:
        engine.step()
        seen += scheduler.answer("steps", {})["steps"]  # type: ignore[index]
    assert {name for step in seen for name, *_ in step.slices} == {"a", "b"}


def test_blocks_of_an_earlier_run_are_counted_where_their_contents_are_missing() -> None:
    scheduler = Scheduler(scheduler_config(num_blocks=64, num_host_blocks=8), host_keys=[b"1" * 32, b"2" * 32])
    answer = scheduler.answer("steps", {"events": True})
    assert isinstance(answer, dict)
    assert (answer["restored_blocks"], answer["format"]) == (2, 2)


def test_where_a_prompt_parts_from_an_earlier_one_is_told() -> None:
    run = new_run(block_size=4, num_blocks=64, max_num_batched_tokens=64, max_num_seqs=8)
    first = tuple(range(100, 120))
    asked = {
        "first": first,
        "same": first,
        "parts": (*first[:10], 7, *first[11:]),
        "short": first[:9],
        "on": (*first[:10], 7, *first[11:], 1, 2),
        "other": tuple(range(200, 220)),
    }
    for name, prompt in asked.items():
        run.add(request(name, prompt, 1))
        run.to_end()
    told_of = {name: told(run, name)["prefix"] for name in asked}
    assert told_of["first"]["why"] == told_of["other"]["why"]
    assert "begins with its first token" in told_of["other"]["why"]
    assert (told_of["other"]["common_tokens"], told_of["other"]["request_id"]) == (0, None)
    parts = told_of["parts"]
    assert (parts["cached_tokens"], parts["common_tokens"], parts["token"], parts["other_token"]) == (10, 10, 7, 110)
    assert parts["request_id"] in {"first", "same"}
    assert "up to position 10, where it has token 7 and the other one 110" in parts["why"]
    assert (told_of["same"]["cached_tokens"], told_of["same"]["token"]) == (19, None)
    assert told_of["same"]["why"] == "All of it is the beginning of first."
    assert told_of["short"]["why"].startswith("All of it is the beginning of ")
    assert told_of["on"]["why"].startswith("It is like parts up to position 20, where it has token 1 and")
    run.add(request("live", (1, 2, 3), 1), request("longer", (1, 2, 3, 4), 1))
    run.to_end()
    assert told(run, "longer")["prefix"]["why"] == "It goes on behind the 3 tokens of live."


def test_a_prefix_that_was_lost_is_told_apart_from_one_that_never_was() -> None:
    run = new_run(block_size=4, num_blocks=8, max_num_batched_tokens=64, max_num_seqs=8)
    prompt = tuple(range(100, 120))
    run.add(request("first", prompt, 1))
    run.to_end()
    run.add(request("large", tuple(range(200, 230)), 1))
    run.to_end()
    run.add(
        request("again", prompt, 1),
        request("scored", prompt, 1, prompt_logprobs=0),
        request("salted", prompt, 1, salt="s"),
    )
    run.to_end()
    again = told(run, "again")["prefix"]
    assert again["common_tokens"] == 20
    assert again["cached_tokens"] < 16
    assert "Its first 20 tokens are those of first" in again["why"]
    assert "had been given to others" in again["why"]
    assert "computed whole" in told(run, "scored")["prefix"]["why"]
    assert told(run, "salted")["prefix"]["common_tokens"] == 0
    without = new_run(enable_prefix_caching=False)
    without.add(request("a", 4, 1))
    assert told(without, "a")["prefix"] is None


@pytest.mark.parametrize(
    ("reason", "words"), [("client", "its client did not read its tokens"), ("adapters", "requests for other adapters")]
)
def test_who_is_held_has_the_reason_told(reason: HoldReason, words: str) -> None:
    run = new_run()
    run.add(request("a", 20, 4), request("b", 20, 40))
    run.one_step()
    run.scheduler.hold("a", reason)
    assert (told(run, "a")["state"], told(run, "a")["reason"]) == ("held", reason)
    run.to_end()
    run.scheduler.release("a")
    run.to_end()
    one = told(run, "a")
    assert spent(one)["held", reason] == 39
    assert words in one["why"]
    assert "preempt" not in one["why"]

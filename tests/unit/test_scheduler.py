"""A request's life in the scheduler: entering, outputs, ends, forks, resumption, watching."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.batch import SampledToken, StepResult
from quire_engine.errors import ConfigError, InfeasibleRequest
from quire_engine.scheduling.scheduler import InvariantViolation
from quire_engine.types import GenerationRequest, TokenOutput
from support.fake_executor import Run, expected_tokens, new_run, own_tokens, request


def of(run: Run, name: str, choice: int = 0) -> list[TokenOutput]:
    return [o for o in run.outputs if (o.request_id, o.choice) == (name, choice)]


def produced_alone(run: Run, *wanted: GenerationRequest) -> bool:
    """Every choice has exactly the tokens that it would have alone."""
    return all(
        tuple(run.tokens[one.request_id, choice]) == expected_tokens(one, choice)
        for one in wanted
        for choice in range(one.n)
    )


def test_nothing_to_do() -> None:
    run = new_run()
    assert run.scheduler.schedule(0.0) is None
    assert not run.scheduler.has_work
    assert run.scheduler.stats().blocks_free == 256


def test_limits_are_checked_at_construction() -> None:
    with pytest.raises(ConfigError):
        new_run(max_num_batched_tokens=8)


def test_a_request_ends_at_its_length() -> None:
    run, wanted = new_run(), request("r", 40, 5)
    run.add(wanted)
    run.to_end()
    assert produced_alone(run, wanted)
    assert [o.finish for o in of(run, "r")] == [None] * 4 + ["length"]
    assert len(run.log) == 5


def test_a_stop_token_ends_it_and_is_delivered() -> None:
    full = expected_tokens(request("r", 40, 8), 0)
    run = new_run()
    run.add(request("r", 40, 8, stop=(full[3], 5000)))
    run.to_end()
    last = of(run, "r")[-1]
    assert tuple(run.tokens["r", 0]) == full[:4]
    assert (last.finish, last.stop_token_id, last.token_ids) == ("stop", full[3], (full[3],))


def test_a_stop_token_on_the_last_place_is_a_stop() -> None:
    full = expected_tokens(request("r", 40, 4), 0)
    run = new_run()
    run.add(request("r", 40, 4, stop=(full[3],)))
    run.to_end()
    assert of(run, "r")[-1].finish == "stop"


def test_no_tokens_asked_for() -> None:
    run = new_run(max_num_batched_tokens=96)
    run.add(request("r", 100, 0, n=2, prompt_logprobs=1))
    run.to_end()
    assert [(o.choice, o.token_ids, o.finish) for o in run.outputs] == [(0, (), "length"), (1, (), "length")]
    assert len(run.outputs[0].prompt_logprobs or ()) == 100
    assert run.outputs[1].prompt_logprobs is None
    assert not any(item.wants_sample for batch in run.log for item in batch.items)


def test_the_same_id_twice_is_refused_while_it_lives() -> None:
    run = new_run()
    run.add(request("r"))
    with pytest.raises(InfeasibleRequest, match="unfinished"):
        run.add(request("r"))
    run.to_end()
    run.add(request("r"))


def test_times_come_from_the_clock_that_is_passed() -> None:
    run = new_run(prefill_chunk=256)
    run.scheduler.add(request("r", 300, 3, arrival=2.0), 3.0)
    outputs: list[TokenOutput] = []
    for start, end in [(5.0, 6.0), (7.0, 9.5), (10.0, 11.0), (12.0, 13.0)]:
        batch = run.scheduler.schedule(start)
        assert batch is not None
        outputs += run.scheduler.apply(batch, run.executor.execute(batch), end)
    first, middle, last = outputs
    assert first.timing is not None
    assert first.timing.queue_seconds == 3.0
    assert first.timing.prefill_seconds == 4.5, "two chunks"
    assert middle.timing is None
    assert last.timing == first.timing


def test_prompt_scores_are_collected_over_chunks_and_sent_once() -> None:
    run = new_run(max_num_batched_tokens=96, prefill_chunk=32)
    wanted = request("r", 100, 3, n=2, prompt_logprobs=2)
    run.add(wanted)
    run.to_end()
    scores = [o.prompt_logprobs for o in run.outputs if o.prompt_logprobs is not None]
    assert len(scores) == 1
    assert of(run, "r")[0].prompt_logprobs is scores[0]
    assert scores[0][0] is None
    assert tuple(s.token_id for s in scores[0][1:] if s) == wanted.prompt_token_ids[1:]
    assert tuple(s.logprob for s in scores[0][1:] if s) == tuple(-float(p) for p in range(1, 100))


def test_one_prompt_token_has_no_score() -> None:
    run = new_run()
    run.add(request("r", 1, 1, prompt_logprobs=0))
    run.to_end()
    assert run.outputs[0].prompt_logprobs == (None,)


def test_scoring_the_prompt_does_not_read_the_cache() -> None:
    run, prompt = new_run(), own_tokens("p", 64)
    for name, logprobs in [("a", None), ("b", 1), ("c", None)]:
        run.add(request(name, prompt, 2, prompt_logprobs=logprobs))
        run.to_end()
    assert [of(run, name)[0].num_cached_tokens for name in "abc"] == [0, 0, 48]
    assert len(of(run, "b")[0].prompt_logprobs or ()) == 64
    assert run.scheduler.stats().total_prefix_query_tokens == 128


def test_a_fully_cached_prompt_still_computes_its_last_block() -> None:
    run, prompt = new_run(), own_tokens("p", 64)
    run.add(request("a", prompt, 2))
    run.to_end()
    run.add(request("b", prompt, 2))
    batch = run.one_step()
    assert batch is not None
    assert [(item.start, item.num_tokens) for item in batch.items] == [(48, 16)]


def test_output_is_cached_too() -> None:
    run = new_run()
    first = request("a", 20, 30)
    run.add(first)
    run.to_end()
    run.add(request("b", (*first.prompt_token_ids, *expected_tokens(first, 0), 7), 2))
    run.to_end()
    assert of(run, "b")[0].num_cached_tokens == 48, "49 tokens were computed: three blocks"


def test_no_caching_when_it_is_off() -> None:
    run, prompt = new_run(enable_prefix_caching=False), own_tokens("p", 64)
    for name in "ab":
        run.add(request(name, prompt, 2))
        run.to_end()
    assert of(run, "b")[0].num_cached_tokens == 0
    assert run.scheduler.stats().blocks_cached == 0
    assert run.scheduler.stats().total_prefix_query_tokens == 0


def test_salts_keep_tenants_apart() -> None:
    run, prompt = new_run(), own_tokens("p", 64)
    for name, salt in [("a", "x"), ("b", "y"), ("c", "x")]:
        run.add(request(name, prompt, 2, salt=salt))
        run.to_end()
    assert [of(run, name)[0].num_cached_tokens for name in "abc"] == [0, 0, 48]


def test_choices_fork_from_one_row() -> None:
    run, wanted = new_run(), request("r", 50, 6, n=3)
    run.add(wanted)
    batch = run.one_step()
    assert batch is not None
    (item,) = batch.items
    assert (item.choice, [fork.choice for fork in item.forks]) == (0, [1, 2])
    run.to_end()
    assert produced_alone(run, wanted)
    assert run.executor.num_copies == 2


def test_choices_end_by_themselves() -> None:
    full = [expected_tokens(request("r", 50, 9, n=2), choice) for choice in (0, 1)]
    run, wanted = new_run(), request("r", 50, 9, n=2, stop=(full[0][2],))
    run.add(wanted)
    run.to_end()
    assert produced_alone(run, wanted)
    assert [run.finishes["r", choice].finish for choice in (0, 1)] == ["stop", "length"]


def test_resumed_choices_go_on_where_they_were() -> None:
    whole = request("r", 50, 12, n=3)
    tokens = [expected_tokens(whole, choice) for choice in range(3)]
    resumed = dataclasses.replace(
        whole, resumed_token_ids=(tokens[0][:5], tokens[1], tokens[2][:9]), finished_choices=(1,)
    )
    run = new_run()
    run.add(resumed)
    run.to_end()
    assert set(run.tokens) == {("r", 0), ("r", 2)}
    assert (tuple(run.tokens["r", 0]), tuple(run.tokens["r", 2])) == (tokens[0][5:], tokens[2][9:])
    assert not any(item.forks for batch in run.log for item in batch.items)


def test_resumed_choices_with_and_without_tokens() -> None:
    whole = request("r", 50, 12, n=3)
    tokens = [expected_tokens(whole, choice) for choice in range(3)]
    run = new_run()
    run.add(dataclasses.replace(whole, resumed_token_ids=(tokens[0][:7], (), ())))
    run.to_end()
    assert tuple(run.tokens["r", 0]) == tokens[0][7:]
    assert (tuple(run.tokens["r", 1]), tuple(run.tokens["r", 2])) == tuple(tokens[1:])


def test_prompt_scores_are_not_sent_again_to_a_resumed_choice() -> None:
    whole = request("r", 20, 6, prompt_logprobs=1)
    run = new_run()
    run.add(dataclasses.replace(whole, resumed_token_ids=(expected_tokens(whole, 0)[:2],)))
    run.to_end()
    assert all(o.prompt_logprobs is None for o in run.outputs)
    assert not any(item.wants_prompt_logprobs for batch in run.log for item in batch.items)


def test_preempted_requests_produce_what_they_would_alone() -> None:
    run = new_run(num_blocks=10, max_num_seqs=8)
    wanted = [request(f"r{i}", 20, 60, n=1 + i % 2) for i in range(6)]
    run.add(*wanted)
    run.to_end()
    assert produced_alone(run, *wanted)
    stats = run.scheduler.stats()
    assert stats.total_preemptions > 0
    timings = [run.finishes[one.request_id, 0].timing for one in wanted]
    assert sum(t.num_preemptions for t in timings if t) == stats.total_preemptions
    assert any(t.kv_wait_seconds > 0 for t in timings if t)
    assert stats.blocks_used == 0


def test_a_preempted_family_shares_its_prompt_again() -> None:
    """Its footprint counts the prompt once, so it must fit again in as many blocks as the first time."""
    run = new_run(num_blocks=14, enable_prefix_caching=False)
    elder, family = request("elder", 16, 130), request("family", 100, 24, n=4)
    run.add(elder, family)
    run.to_end()
    assert produced_alone(run, elder, family)
    assert run.finishes["family", 0].timing is not None
    assert run.finishes["family", 0].timing.num_preemptions > 0


def test_prompt_scores_survive_a_preemption_in_the_middle() -> None:
    run = new_run(num_blocks=7, max_num_batched_tokens=80, min_chunk=16, prefill_chunk=16)
    elder, scored = request("elder", 14, 40), request("scored", 90, 4, prompt_logprobs=1)
    run.add(elder, scored)
    run.to_end()
    assert produced_alone(run, elder, scored)
    timing = run.finishes["scored", 0].timing
    assert timing is not None
    assert timing.num_preemptions > 0
    scores = [o.prompt_logprobs for o in of(run, "scored") if o.prompt_logprobs]
    assert [tuple(s.token_id for s in one[1:] if s) for one in scores] == [scored.prompt_token_ids[1:]]


def test_abort_frees_at_once_in_every_state() -> None:
    run = new_run(num_blocks=10, max_num_seqs=2)
    run.add(*(request(f"r{i}", 40, 30) for i in range(4)))
    run.one_step()
    assert run.scheduler.stats().running == 2
    for i in (0, 3):
        assert run.scheduler.abort(f"r{i}")
        assert not run.scheduler.abort(f"r{i}")
        run.scheduler.check_invariants()
    run.to_end()
    assert {name for name, _ in run.finishes} == {"r1", "r2"}
    assert run.scheduler.stats().blocks_used == 0


def test_abort_between_schedule_and_apply() -> None:
    run = new_run()
    run.add(request("a", 20, 5, n=2), request("b", 20, 5))
    batch = run.scheduler.schedule(0.0)
    assert batch is not None
    result = run.executor.execute(batch)
    run.scheduler.abort("a")
    assert {o.request_id for o in run.scheduler.apply(batch, result, 1.0)} == {"b"}
    run.scheduler.check_invariants()


def test_fail_ends_every_unfinished_choice_with_an_error() -> None:
    run = new_run()
    run.add(request("r", 20, 5, n=3))
    run.one_step()
    outputs = run.scheduler.fail("r", "the disk is full")
    assert [(o.choice, o.finish, o.error) for o in outputs] == [(c, "error", "the disk is full") for c in range(3)]
    assert run.scheduler.fail("r", "again") == []
    assert not run.scheduler.has_work


def test_a_failed_waiting_request_has_no_timing() -> None:
    run = new_run()
    run.add(request("r", 20, 5))
    assert [o.timing for o in run.scheduler.fail("r", "no")] == [None]


def test_an_error_in_a_step_ends_that_sequence_alone() -> None:
    run = new_run()
    a, b = request("a", 20, 6, n=2), request("b", 20, 6)
    run.add(a, b)
    run.one_step()
    run.executor.errors[run.log[0].items[0].sequence_id] = "not a number"
    run.to_end()
    assert (run.finishes["a", 0].finish, run.finishes["a", 0].error) == ("error", "not a number")
    assert run.finishes["a", 1].finish == "length"
    assert produced_alone(run, b)


def test_an_error_in_the_shared_prompt_ends_every_choice() -> None:
    run = new_run()
    run.add(request("a", 20, 6, n=3))
    run.executor.errors[0] = "not a number"
    run.one_step()
    assert [(o.choice, o.finish) for o in run.outputs] == [(0, "error"), (1, "error"), (2, "error")]


def test_an_error_in_one_sample_ends_one_choice() -> None:
    run = new_run()
    run.add(request("a", 20, 6, n=2))
    batch = run.scheduler.schedule(0.0)
    assert batch is not None
    samples = {0: (SampledToken(error="all masked"),), 1: (SampledToken(token_id=4),)}
    outputs = run.scheduler.apply(batch, StepResult(samples=samples), 1.0)
    assert [(o.choice, o.finish, o.error, o.token_ids) for o in outputs] == [
        (0, "error", "all masked", ()),
        (1, None, None, (4,)),
    ]
    run.scheduler.check_invariants()


def test_prompt_scores_belong_to_choice_0_alone() -> None:
    run = new_run()
    run.add(request("a", 20, 6, n=2, prompt_logprobs=1))
    batch = run.scheduler.schedule(0.0)
    assert batch is not None
    result = run.executor.execute(batch)
    result.samples[0] = (SampledToken(error="all masked"),)
    outputs = run.scheduler.apply(batch, result, 1.0)
    assert [(o.choice, o.finish, o.prompt_logprobs) for o in outputs] == [(0, "error", None), (1, None, None)]


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
    assert slots.scheduler.stats().waiting == {"kv": 0, "slots": 4, "budget": 0}
    blocks = new_run(num_blocks=4)
    blocks.add(request("a", 40, 8), request("b", 40, 8))
    blocks.one_step()
    assert blocks.scheduler.stats().waiting == {"kv": 1, "slots": 0, "budget": 0}
    budget = new_run(max_num_batched_tokens=80, prefill_chunk=80)
    budget.add(request("a", 80, 8), request("b", 40, 8))
    budget.one_step()
    assert budget.scheduler.stats().waiting == {"kv": 0, "slots": 0, "budget": 1}


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
    ("streams", "sizes"), [([], [512]), (["stream"], [65] * 4)], ids=["alone", "beside a stream, 64 tokens a step"]
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


def test_counters() -> None:
    run = new_run()
    run.add(request("a", 40, 4), request("b", 40, 4))
    run.one_step()
    stats = run.scheduler.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.running) == (80, 0, 2)
    run.add(request("c", 10, 4))
    run.one_step()
    stats = run.scheduler.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.running) == (10, 2, 3)


def test_the_bound_is_printed_while_the_request_lives() -> None:
    run = new_run()
    run.add(request("a", 16, 8), request("b", 16, 8))
    assert run.scheduler.wait_bound("a") < run.scheduler.wait_bound("b")
    run.to_end()
    with pytest.raises(KeyError):
        run.scheduler.wait_bound("a")


def test_a_batch_stays_as_it_was_made() -> None:
    """Whatever comes: sequences that grow, copy a block, are preempted, end and are aborted."""
    run = new_run(num_blocks=10, max_num_seqs=8)
    run.add(*(request(f"r{i}", 20, 60, n=1 + i % 2) for i in range(6)))
    made = []
    while run.scheduler.has_work:
        batch = run.scheduler.schedule(float(run.step))
        assert batch is not None
        made.append((batch, repr(batch)))
        run.step += 1
        run.take(run.scheduler.apply(batch, run.executor.execute(batch), float(run.step)))
        if run.step == 30:
            run.scheduler.abort("r3")
    assert run.scheduler.stats().total_preemptions > 0
    assert run.executor.num_copies > 0
    assert all(repr(batch) == text for batch, text in made)


def test_several_tokens_of_one_step_go_out_together_up_to_the_last_wanted() -> None:
    def sampled(*token_ids: int) -> StepResult:
        return StepResult(samples={0: tuple(SampledToken(token_id=token) for token in token_ids)})

    for tokens, wanted, finish in [
        ((5, 6), (5, 6), None),
        ((5, 9, 6), (5, 9), "stop"),
        ((5, 6, 7, 8), (5, 6, 7), "length"),
    ]:
        run = new_run()
        run.add(request("a", 20, 3, stop=(9,)))
        batch = run.scheduler.schedule(0.0)
        assert batch is not None
        (output,) = run.scheduler.apply(batch, sampled(*tokens), 1.0)
        assert (output.token_ids, output.finish) == (wanted, finish)
        assert output.stop_token_id == (9 if finish == "stop" else None)
        assert run.scheduler.has_work == (finish is None)
        run.scheduler.check_invariants()


def test_a_corrupted_scheduler_is_noticed() -> None:
    run = new_run()
    run.add(request("a", 20, 5), request("b", 20, 5))
    run.one_step()
    group = run.scheduler._roster.running[0]
    group.sequences[0].num_computed += 1
    with pytest.raises(InvariantViolation, match="request a, choice 0"):
        run.scheduler.check_invariants()
    group.sequences[0].num_computed -= 1
    run.scheduler._roster.running.remove(group)
    with pytest.raises(InvariantViolation, match="exactly one queue"):
        run.scheduler.check_invariants()

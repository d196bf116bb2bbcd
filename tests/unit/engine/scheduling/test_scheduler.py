"""A request's life in the scheduler: entering, outputs, ends, forks, resumption, watching."""

from __future__ import annotations

import dataclasses

import pytest

from quire_engine.contract.batch import SampledToken, StepResult
from quire_engine.contract.errors import ConfigError, InfeasibleRequest
from quire_engine.contract.invariants import InvariantViolation
from quire_engine.contract.types import TokenOutput
from support.fake_executor import expected_tokens, new_run, outputs_of, own_tokens, produced_alone, request


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
    assert [o.finish for o in outputs_of(run, "r")] == [None] * 4 + ["length"]
    assert len(run.log) == 5


def test_a_stop_token_ends_it_and_is_delivered() -> None:
    full = expected_tokens(request("r", 40, 8), 0)
    run = new_run()
    run.add(request("r", 40, 8, stop=(full[3], 5000)))
    run.to_end()
    last = outputs_of(run, "r")[-1]
    assert tuple(run.tokens["r", 0]) == full[:4]
    assert (last.finish, last.stop_token_id, last.token_ids) == ("stop", full[3], (full[3],))


def test_a_stop_token_on_the_last_place_is_a_stop() -> None:
    full = expected_tokens(request("r", 40, 4), 0)
    run = new_run()
    run.add(request("r", 40, 4, stop=(full[3],)))
    run.to_end()
    assert outputs_of(run, "r")[-1].finish == "stop"


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
    assert outputs_of(run, "r")[0].prompt_logprobs is scores[0]
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
    assert [outputs_of(run, name)[0].num_cached_tokens for name in "abc"] == [0, 0, 63]
    assert len(outputs_of(run, "b")[0].prompt_logprobs or ()) == 64
    assert run.scheduler.stats().total_prefix_query_tokens == 128


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    run, prompt = new_run(), own_tokens("p", 64)
    run.add(request("a", prompt, 2))
    run.to_end()
    run.add(request("b", prompt, 2))
    batch = run.one_step()
    assert batch is not None
    assert [(item.start, item.num_tokens) for item in batch.items] == [(63, 1)]
    assert len(batch.copies) == 1


def test_output_is_cached_too() -> None:
    run = new_run()
    first = request("a", 20, 30)
    run.add(first)
    run.to_end()
    run.add(request("b", (*first.prompt_token_ids, *expected_tokens(first, 0), 7), 2))
    run.to_end()
    assert outputs_of(run, "b")[0].num_cached_tokens == 48, "49 were computed: one alone is not worth a copy"


def test_no_caching_when_it_is_off() -> None:
    run, prompt = new_run(enable_prefix_caching=False), own_tokens("p", 64)
    for name in "ab":
        run.add(request(name, prompt, 2))
        run.to_end()
    assert outputs_of(run, "b")[0].num_cached_tokens == 0
    assert run.scheduler.stats().blocks_cached == 0
    assert run.scheduler.stats().total_prefix_query_tokens == 0


def test_salts_keep_tenants_apart() -> None:
    run, prompt = new_run(), own_tokens("p", 64)
    for name, salt in [("a", "x"), ("b", "y"), ("c", "x")]:
        run.add(request(name, prompt, 2, salt=salt))
        run.to_end()
    assert [outputs_of(run, name)[0].num_cached_tokens for name in "abc"] == [0, 0, 63]


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
        return StepResult(
            samples={0: tuple(SampledToken(token_id=token, is_forced=i > 0) for i, token in enumerate(token_ids))}
        )

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
    group.sequences[0].kv.num_computed += 1
    with pytest.raises(InvariantViolation, match="request a, choice 0"):
        run.scheduler.check_invariants()
    group.sequences[0].kv.num_computed -= 1
    run.scheduler._roster.running.remove(group)
    with pytest.raises(InvariantViolation, match="exactly one queue"):
        run.scheduler.check_invariants()

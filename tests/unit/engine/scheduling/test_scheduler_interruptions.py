"""What cuts a request short: preemption, abort, failure, an error in a step; the others do not notice."""

from __future__ import annotations

import pytest

from quire_engine.contract.batch import SampledToken, StepResult
from support.fake_executor import DEAR, new_run, outputs_of, produced_alone, request


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


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_tokens_computed_again_are_counted(prefix_caching: bool) -> None:
    run = new_run(num_blocks=10, max_num_seqs=8, enable_prefix_caching=prefix_caching)
    wanted = [request(f"r{i}", 20, 60) for i in range(6)]
    run.add(*wanted)
    run.to_end()
    stats, computed = run.scheduler.stats(), sum(batch.num_tokens for batch in run.log)
    assert stats.total_preemptions > 0
    once = sum(20 + 60 - 1 for _ in wanted)  # the last token of each is sampled, and never computed
    assert stats.total_recomputed_tokens == computed - once > 0


def test_a_wait_for_blocks_is_told_while_it_lasts() -> None:
    """Of the queue's head alone, from the step that turned it away until it enters or is gone."""
    run = new_run(num_blocks=8, enable_prefix_caching=False)
    run.add(request("first", 100, 20))
    run.one_step()
    assert run.scheduler.stats().kv_waiting_since is None
    run.add(request("second", 60, 4), request("third", 60, 4))
    run.one_step()
    since = run.scheduler.stats().kv_waiting_since
    assert since is not None
    run.one_step()
    stats = run.scheduler.stats()
    assert stats.kv_waiting_since == since
    assert stats.total_kv_wait_seconds > 0
    run.scheduler.abort("second")
    assert run.scheduler.stats().kv_waiting_since is None
    run.to_end()
    stats = run.scheduler.stats()
    assert stats.kv_waiting_since is None
    timing = run.finishes["third", 0].timing
    assert timing is not None
    assert stats.total_kv_wait_seconds > timing.kv_wait_seconds > 0
    assert stats.total_blocks_taken == 8 + 4, "of the first and the third"


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
    scores = [o.prompt_logprobs for o in outputs_of(run, "scored") if o.prompt_logprobs]
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


def test_a_group_that_the_device_has_no_memory_for_is_preempted_and_tried_again() -> None:
    run = new_run()
    a, b = request("a", 20, 6, n=2), request("b", 20, 6)
    run.add(a, b)
    run.one_step()
    run.executor.starved |= {run.log[0].items[0].sequence_id}
    run.to_end()
    assert produced_alone(run, a, b)
    timings = [run.finishes[name, 0].timing for name in "ab"]
    assert [timing.num_preemptions for timing in timings if timing] == [1, 0]


def test_a_group_that_the_device_never_has_memory_for_ends_with_an_error() -> None:
    run = new_run()
    a, b = request("a", 20, 6, n=2), request("b", 20, 6)
    run.add(a, b)
    while ("a", 0) not in run.finishes:
        run.executor.starved |= {0}
        run.one_step()
        assert run.step < 20
    ends = [run.finishes["a", choice] for choice in range(2)]
    assert [(end.finish, end.error) for end in ends] == [
        ("error", "the device has no memory left to compute this request")
    ] * 2
    run.executor.starved.clear()
    run.to_end()
    assert produced_alone(run, b)


def test_the_lengths_of_aborted_outputs_are_learned() -> None:
    """The server ends a request by an abort when it finds a stop string."""

    def entered(num_aborted: int) -> int:
        limits = {"num_blocks": 40, "max_num_seqs": 16, "admission": "expected", "enable_prefix_caching": False}
        run = new_run(seconds_per_token=DEAR, **limits)
        for i in range(num_aborted):
            run.add(request(f"short{i}", 20, 400, stop=(10**6,)))
            for _ in range(4):
                run.one_step()
            run.scheduler.abort(f"short{i}")
        run.add(*(request(f"r{i}", 20, 400, stop=(10**6,)) for i in range(8)))
        for _ in range(3):
            run.one_step()
        return run.scheduler.stats().running

    assert entered(0) < entered(8) == 8

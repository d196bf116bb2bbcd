"""A row that holds no number: who ends, who is computed anew, and what nobody may match any more."""

from __future__ import annotations

import pytest

from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.types import NON_FINITE, GenerationRequest, TokenOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, Run, expected_tokens, new_run, produced_alone, request
from support.limits import scheduler_config

PROMPT = tuple(range(100, 140))
BLOCK = 4


class Spoiled(FakeExecutor):
    """Rows at a position of these prompts hold no number, a number of times."""

    def __init__(self, block_size: int, *, max_in_flight: int = 1) -> None:
        super().__init__(block_size, max_in_flight=max_in_flight)
        self.at: dict[tuple[int, int], int] = {}  # (first token of the prompt, end of the slice) -> times left

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        for item in batch.items:
            place = item.prompt_token_ids[0], item.end
            if self.at.get(place, 0) and item.wants_sample:
                self.at[place] -= 1
                for sequence_id in (item.sequence_id, *(fork.sequence_id for fork in item.forks)):
                    result.samples[sequence_id] = (SampledToken(error=NON_FINITE),)
                    result.non_finite.add(sequence_id)
        return result


def spoiled_run(**limits: object) -> tuple[Run, Spoiled]:
    run = new_run(block_size=BLOCK, **limits)
    run.executor = executor = Spoiled(BLOCK)
    return run, executor


@pytest.mark.parametrize("end", [40, 43, 48])
@pytest.mark.parametrize("n", [1, 3])
def test_who_has_such_a_row_once_is_computed_anew_and_brings_the_same(end: int, n: int) -> None:
    run, executor = spoiled_run()
    executor.at[PROMPT[0], end] = 1
    wanted, other = request("a", PROMPT, 12, n=n), request("b", 30, 12)
    run.add(wanted, other)
    run.to_end()
    assert produced_alone(run, wanted, other)
    assert [run.finishes["a", choice].timing.num_preemptions for choice in range(n)] == [1] * n  # type: ignore[union-attr]
    assert executor.at[PROMPT[0], end] == 0


@pytest.mark.parametrize("end", [40, 43])
def test_who_has_such_a_row_again_ends_alone_and_leaves_nothing_to_match(end: int) -> None:
    run, executor = spoiled_run()
    executor.at[PROMPT[0], end] = 2
    wanted, other = request("a", PROMPT, 12), request("b", 30, 12)
    run.add(wanted, other)
    run.to_end()
    assert run.finishes["a", 0].error == NON_FINITE
    assert produced_alone(run, other)
    again = request("again", PROMPT, 12)
    run.add(again)
    run.to_end()
    assert run.finishes["again", 0].num_cached_tokens == 0
    assert produced_alone(run, again)


def test_a_choice_that_ends_does_not_end_its_siblings() -> None:
    """Their rows are another's each, from the second token on; the first time all are computed anew."""
    run, executor = spoiled_run()
    wanted = request("a", PROMPT, 12, n=2)
    run.add(wanted)
    run.one_step()
    (first,) = [s for s in run.scheduler._roster.sequences.values() if s.choice == 0]

    def execute(batch: Batch) -> StepResult:
        result = FakeExecutor.execute(executor, batch)
        for item in batch.items:
            if item.sequence_id == first.sequence_id and item.end >= 44 and item.wants_sample:
                result.samples[item.sequence_id] = (SampledToken(error=NON_FINITE),)
                result.non_finite.add(item.sequence_id)
        return result

    executor.execute = execute  # type: ignore[method-assign]
    run.to_end()
    assert run.finishes["a", 0].error == NON_FINITE
    assert tuple(run.tokens["a", 1]) == expected_tokens(wanted, 1)


def test_who_has_matched_what_is_wrong_is_computed_without_it() -> None:
    """The first request's blocks were cached before its row showed that they hold no numbers."""
    run, executor = spoiled_run()
    first, second = request("a", PROMPT, 30), request("b", (*PROMPT, 1, 2, 3), 12)
    run.add(first)
    for _ in range(3):
        run.one_step()
    executor.at[PROMPT[0], 43] = 1  # the second request's first row: it has just matched the first one's blocks
    run.add(second)
    run.to_end()
    assert produced_alone(run, first, second)
    assert run.finishes["b", 0].num_cached_tokens >= 36


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("is_held", [False, True])
def test_who_had_swapped_out_what_is_wrong_computes_it_again(n: int, is_held: bool) -> None:
    """The prompt's blocks are the other request's too, so they went by their hashes alone and are only in the pool."""
    run, executor = spoiled_run(num_blocks=9 + 3 * (n - 1), num_host_blocks=20, max_num_seqs=4, min_chunk=4)
    shared = PROMPT[:16]
    first, second = request("a", shared, 16), request("b", (*shared, 7), 10, n=n)
    run.add(first)
    run.one_step()
    run.add(second)
    group = run.scheduler._roster.live["b"]
    while not group.is_swapped:
        run.one_step()
    before = group.sequences[0].kv.swapped
    assert before is not None
    if is_held:
        run.scheduler.hold("b")
    (own,) = run.scheduler._roster.live["a"].sequences
    executor.non_finite.add(own.sequence_id)
    run.one_step()
    assert not group.is_swapped
    assert group.num_computed_before >= before.num_tokens
    assert run.scheduler.stats().host_blocks_used == 0
    if is_held:
        run.scheduler.release("b")
    run.to_end()
    assert produced_alone(run, first, second)
    assert run.scheduler.stats().total_recomputed_tokens > before.num_tokens


def test_a_copy_on_the_host_of_what_is_wrong_is_dropped_from_its_files_too() -> None:
    run, executor = spoiled_run(num_blocks=12, num_host_blocks=20)
    engine = Engine(run.scheduler, executor, check_invariants=True)
    outputs: list[TokenOutput] = []
    engine.on_step = lambda step: outputs.extend(step.outputs)

    def play(wanted: GenerationRequest) -> TokenOutput:
        engine.submit(wanted)
        while engine.has_work:
            engine.step()
        assert tuple(t for o in outputs if o.request_id == wanted.request_id for t in o.token_ids) == expected_tokens(
            wanted, 0
        )
        return next(o for o in reversed(outputs) if o.request_id == wanted.request_id)

    play(request("a", PROMPT, 4))
    play(request("other", 44, 4))
    copies = run.scheduler.stats().host_blocks_cached
    assert copies >= 10
    executor.at[PROMPT[0], 40] = 1
    assert play(request("again", PROMPT, 4)).num_cached_tokens >= 36  # as it first entered
    assert len(executor.forgotten) == 10
    assert sum(item.start == 0 for batch in executor.log for item in batch.items if item.run == 1) == 1
    assert play(request("later", PROMPT, 4)).num_cached_tokens >= 36  # what was computed anew


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_that_was_planned_ahead_is_void_for_them(times: int) -> None:
    config = scheduler_config(
        num_blocks=64, block_size=BLOCK, max_num_batched_tokens=512, itl_target=0.0, plans_ahead=True
    )
    executor = Spoiled(BLOCK, max_in_flight=2)
    engine = Engine(Scheduler(config), executor, check_invariants=True)
    outputs: list[TokenOutput] = []
    engine.on_step = lambda step: outputs.extend(step.outputs)
    # Without penalties, so that the next step is planned before this one's tokens are known.
    wanted: list[GenerationRequest] = [request(name, 24, 12, penalty=0.0) for name in ("a", "b")]
    executor.at[wanted[0].prompt_token_ids[0], 29] = times
    for one in wanted:
        engine.submit(one)
    for _ in range(200):
        if engine.has_work:
            engine.step()
    said = {
        one.request_id: tuple(t for o in outputs if o.request_id == one.request_id for t in o.token_ids)
        for one in wanted
    }
    assert said["b"] == expected_tokens(wanted[1], 0)
    if times == 1:
        assert said["a"] == expected_tokens(wanted[0], 0)
    else:
        assert [o.error for o in outputs if o.finish == "error"] == [NON_FINITE]
    assert len([o for o in outputs if o.finish is not None]) == 2

"""Beam search as the scheduler runs it: what it refuses, when it ends, what its steps hold and copy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_engine.contract.errors import InfeasibleRequest
from quire_engine.contract.types import BeamParams, GenerationRequest, SamplingParams, StopParams, TokenLogprobs
from quire_engine.scheduling.beams import BeamSearch
from support.fake_executor import Run, new_run, request
from support.fake_model import expected_beams

WIDTH = 3


def search(
    *, width: int = 2, stops: tuple[int, ...] = (), most: int = 4, n: int = 1, **params: object
) -> tuple[BeamSearch, BeamParams]:
    beam = BeamParams(width=width, **params)
    wanted = GenerationRequest(
        request_id="r",
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=most, stop_token_ids=stops),
        n=n,
        beam=beam,
    )
    return BeamSearch(wanted, beam), beam


def told(*likeliest: tuple[int, float]) -> TokenLogprobs:
    ids, logprobs = zip(*likeliest, strict=True)
    return TokenLogprobs(token_id=ids[0], logprob=logprobs[0], rank=1, top_ids=ids, top_logprobs=logprobs)


def step(beams: BeamSearch, *offers: TokenLogprobs) -> list[tuple[int, int]] | None:
    assert [beams.offer(lane, offer) for lane, offer in enumerate(offers)] == [False] * (len(offers) - 1) + [True]
    return beams.advance()


def test_of_equal_totals_the_beam_that_ranked_before_wins_then_the_earlier_token() -> None:
    beams, _ = search()
    assert step(beams, *[told((7, -1.0), (3, -1.0), (9, -1.0))] * 2) == [(0, 7), (0, 3)]
    beams.assign([0, 1])
    assert step(beams, told((5, -1.0), (6, -1.0)), told((4, -1.0), (2, -1.0))) == [(0, 5), (0, 6)]


def test_a_stop_token_among_the_first_ends_a_beam_and_another_goes_on() -> None:
    beams, _ = search(stops=(0,), early_stopping=True)
    assert beams.sampling.num_logprobs == 3  # two that do not stop, whichever those are
    assert step(beams, *[told((0, -0.1), (3, -1.0), (9, -2.0))] * 2) == [(0, 3), (0, 9)]
    assert [found.score for found in beams.finished] == [-0.1]
    beams.assign([0, 1])
    # The stop token that ranks third is nobody's end; the second's is, and with two the search is over.
    assert step(beams, told((4, -0.1), (0, -0.2), (5, -9.0)), told((6, -8.0), (0, -8.0), (8, -9.0))) == []
    assert beams.is_over
    assert [tuple(token.token_id for token in found.tokens()) for found in beams.finished] == [(0,), (3, 0)]
    assert [found.finish for found in beams.finished] == ["stop", "stop"]


@pytest.mark.parametrize(
    ("rule", "penalty", "goes_on"),
    [(True, 1.0, False), (False, 1.0, False), ("never", 1.0, True), ("never", 0.0, False), (False, 3.0, True)],
)
def test_when_two_finished_beams_are_enough(rule, penalty, goes_on) -> None:
    """The finished ones sum to -0.1 and -1.2, the best live one to -3.0 with two of eight tokens."""
    beams, _ = search(stops=(0,), most=8, early_stopping=rule, length_penalty=penalty)
    step(beams, *[told((0, -0.1 if penalty < 3 else -1.0), (3, -1.0), (9, -2.5))] * 2)
    beams.assign([0, 1])
    step(beams, told((0, -0.2), (4, -2.0), (5, -9.0)), told((0, -8.0), (6, -8.0), (8, -9.0)))
    assert len(beams.finished) == 2
    assert beams.is_over != goes_on


def test_a_live_beam_that_can_only_draw_level_ends_the_search() -> None:
    beams, _ = search(stops=(0,), length_penalty=0.0)
    step(beams, *[told((0, -1.0), (3, -1.0), (9, -3.0))] * 2)
    beams.assign([0, 1])
    step(beams, told((0, -1.0), (4, -1.0), (5, -9.0)), told((6, -8.0), (0, -8.0), (8, -9.0)))
    assert ([found.score for found in beams.finished], beams.is_over) == ([-1.0, -2.0], True)


def test_what_was_offered_before_a_preemption_is_offered_again() -> None:
    beams, _ = search(width=2)
    assert not beams.offer(0, told((1, -1.0), (2, -2.0)))
    beams.forget_step()
    assert not beams.offer(1, told((1, -1.0), (2, -2.0)))
    assert beams.offer(0, told((1, -1.0), (2, -2.0)))


def test_too_few_continuations_are_told() -> None:
    beams, _ = search(width=4)
    assert step(beams, *[told((1, -1.0), (2, -2.0))] * 4) is None


def test_a_model_with_fewer_tokens_than_beams_is_an_error_of_the_request() -> None:
    run = new_run()
    wanted = request("r", 5, 4, n=2, beam=BeamParams(width=WIDTH))
    original = run.executor.execute

    def short(batch):
        result = original(batch)
        for sequence_id, (sample,) in result.samples.items():
            entry = replace(sample.logprobs, top_ids=sample.logprobs.top_ids[:2], top_logprobs=(-1.0, -2.0))
            result.samples[sequence_id] = (replace(sample, logprobs=entry),)
        return result

    run.executor.execute = short
    run.add(wanted)
    run.to_end()
    assert [(end.finish, end.error) for end in run.finishes.values()] == [
        ("error", "no token is left to choose from for 3 beams")
    ] * 2


def begun(**limits: object) -> tuple[Run, GenerationRequest]:
    run = new_run(**limits)
    wanted = request("r", 20, 12, n=2, beam=BeamParams(width=WIDTH))
    run.add(wanted)
    return run, wanted


def test_nothing_is_told_before_the_end_and_then_all_at_once() -> None:
    run, wanted = begun()
    while not run.outputs:
        run.one_step()
    assert [(output.choice, output.finish) for output in run.outputs] == [(0, "length"), (1, "length")]
    assert [(o.token_ids, o.beam_score, o.finish) for o in run.outputs] == expected_beams(wanted)
    assert not run.scheduler.has_work
    assert run.scheduler.stats().blocks_used == 0


def test_beams_share_what_they_have_in_common_and_copy_to_write() -> None:
    run, _ = begun(block_size=16)
    run.one_step()
    stats = run.scheduler.stats()
    assert (stats.running, stats.blocks_used) == (WIDTH, 2)  # 20 tokens, which all three have in common
    run.one_step()
    assert run.executor.num_copies == WIDTH - 1  # the last to write keeps the half block
    assert run.scheduler.stats().blocks_used <= 1 + WIDTH
    run.to_end()


def test_an_abort_frees_every_beam() -> None:
    run, _ = begun()
    for _ in range(3):
        run.one_step()
    assert run.scheduler.abort("r")
    assert run.scheduler.stats().blocks_used == run.scheduler.stats().running == 0
    run.scheduler.check_invariants()


def test_a_failure_of_one_beam_is_one_of_the_search() -> None:
    run, _ = begun()
    for _ in range(3):
        run.one_step()
    sequence = run.scheduler._roster.live["r"].sequences[-1]
    run.executor.errors[sequence.sequence_id] = "it failed"
    run.to_end()
    assert [(o.choice, o.finish, o.error) for o in run.outputs] == [
        (0, "error", "it failed"),
        (1, "error", "it failed"),
    ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"n": 3}, "n is 3, must be 1 to the beam width, 2"),
        ({"n": 0}, "n is 0"),
        ({"beam": BeamParams(width=17)}, "the beam width is 17, must be 1 to 16"),
        ({"beam": BeamParams(width=0)}, "the beam width is 0"),
        ({"stop": StopParams(max_new_tokens=0)}, "max_tokens of 1 or more"),
        ({"resumed_token_ids": ((5,),)}, "begins again"),
        ({"sampling": SamplingParams(presence_penalty=1.0)}, "cannot be combined with penalties"),
        ({"sampling": SamplingParams(grammar="start: /a/")}, "grammars"),
        ({"sampling": SamplingParams(logit_bias=((5, 1.0),))}, "logit biases"),
        ({"sampling": SamplingParams(allowed_token_ids=(5,))}, "allowed"),
        ({"sampling": SamplingParams(banned_token_ids=(5,))}, "banned"),
        ({"stop": StopParams(max_new_tokens=900)}, "largest max_tokens is"),
    ],
)
def test_what_no_schedule_could_serve_is_refused(changes, text) -> None:
    run = new_run(num_blocks=64, max_model_len=1024)
    wanted = replace(request("r", 5, 4, beam=BeamParams(width=2)), **changes)
    with pytest.raises(InfeasibleRequest, match=text):
        run.add(wanted)
    assert not run.scheduler.has_work

"""A journal entry: what a replay says, and what ends a request that is not replayed."""

from dataclasses import replace

from quire_engine.contract.types import (
    BeamParams,
    GenerationRequest,
    SamplingParams,
    StopParams,
    TokenLogprobs,
    TokenOutput,
)
from quire_server.engine.recovery import JournalEntry

SCORE = TokenLogprobs(token_id=2, logprob=-1.0, rank=1)


def request(n: int = 1, **sampling: int) -> GenerationRequest:
    return GenerationRequest(
        request_id="a",
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(**sampling),
        stop=StopParams(max_new_tokens=8),
        n=n,
    )


def test_a_request_without_tokens_is_replayed_as_it_came() -> None:
    assert JournalEntry(request(n=2)).resumed_request() == request(n=2)


def test_a_replay_carries_delivered_tokens_and_finished_choices() -> None:
    entry = JournalEntry(request(n=3))
    entry.record(TokenOutput(request_id="a", choice=0, token_ids=(5,)))
    entry.record(TokenOutput(request_id="a", choice=0, token_ids=(6,)))
    entry.record(TokenOutput(request_id="a", choice=2, token_ids=(7,), finish="stop"))
    resumed = entry.resumed_request()
    assert resumed.resumed_token_ids == ((5, 6), (), (7,))
    assert resumed.finished_choices == (2,)
    assert resumed.prompt_token_ids == (1, 2)


def test_a_search_is_replayed_from_its_beginning() -> None:
    """Its outputs come together with its end: until then nothing was delivered."""
    search = replace(request(n=2), beam=BeamParams(width=4))
    entry = JournalEntry(search)
    assert entry.resumed_request() == search
    assert not entry.record(TokenOutput(request_id="a", choice=0, token_ids=(5, 6), finish="stop"))
    assert entry.record(TokenOutput(request_id="a", choice=1, token_ids=(5, 7), finish="length"))
    assert len(JournalEntry(search).failure("it is gone", culprit=False)) == 2


def test_prompt_logprobs_are_not_asked_for_twice() -> None:
    entry = JournalEntry(request(num_prompt_logprobs=1))
    assert entry.resumed_request().sampling.num_prompt_logprobs == 1
    entry.record(TokenOutput(request_id="a", token_ids=(5,), prompt_logprobs=(None, SCORE)))
    assert entry.resumed_request().sampling.num_prompt_logprobs is None


def test_the_last_choice_to_finish_ends_the_request() -> None:
    entry = JournalEntry(request(n=2))
    assert not entry.record(TokenOutput(request_id="a", choice=0, token_ids=(5,)))
    assert not entry.record(TokenOutput(request_id="a", choice=1, finish="length"))
    assert entry.record(TokenOutput(request_id="a", choice=0, finish="stop"))


def test_a_failure_ends_the_choices_that_have_not_finished() -> None:
    entry = JournalEntry(request(n=3))
    entry.record(TokenOutput(request_id="a", choice=1, finish="stop"))
    assert entry.failure("no engine", culprit=True) == tuple(
        TokenOutput(request_id="a", choice=choice, finish="error", error="no engine", culprit=True) for choice in (0, 2)
    )

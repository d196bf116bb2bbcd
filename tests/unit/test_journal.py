"""The journal: what a replay says, and whom it blames."""

from quire_engine.types import GenerationRequest, SamplingParams, StopParams, TokenLogprobs, TokenOutput
from quire_server.engine.journal import Journal

SCORE = TokenLogprobs(token_id=2, logprob=-1.0, rank=1)


def request(request_id: str = "a", n: int = 1, **sampling: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(**sampling),
        stop=StopParams(max_new_tokens=8),
        n=n,
    )


def test_a_request_without_tokens_is_replayed_as_it_came() -> None:
    entry = Journal().add(request(n=2))
    assert entry.resumed_request() == request(n=2)


def test_a_replay_carries_delivered_tokens_and_finished_choices() -> None:
    journal = Journal()
    entry = journal.add(request(n=3))
    journal.record(TokenOutput(request_id="a", choice=0, token_ids=(5,)))
    journal.record(TokenOutput(request_id="a", choice=0, token_ids=(6,)))
    journal.record(TokenOutput(request_id="a", choice=2, token_ids=(7,), finish="stop"))
    resumed = entry.resumed_request()
    assert resumed.resumed_token_ids == ((5, 6), (), (7,))
    assert resumed.finished_choices == (2,)
    assert resumed.prompt_token_ids == (1, 2)


def test_prompt_logprobs_are_not_asked_for_twice() -> None:
    journal = Journal()
    entry = journal.add(request(num_prompt_logprobs=1))
    assert entry.resumed_request().sampling.num_prompt_logprobs == 1
    journal.record(TokenOutput(request_id="a", token_ids=(5,), prompt_logprobs=(None, SCORE)))
    assert entry.resumed_request().sampling.num_prompt_logprobs is None


def test_the_last_finish_removes_the_request_and_later_output_is_stale() -> None:
    journal = Journal()
    journal.add(request(n=2))
    journal.record(TokenOutput(request_id="a", choice=1, finish="length"))
    assert len(journal) == 1
    assert journal.record(TokenOutput(request_id="a", choice=0, finish="stop")) is not None
    assert len(journal) == 0
    assert journal.record(TokenOutput(request_id="a", choice=0, token_ids=(1,))) is None


def crash(journal: Journal, *, killed: bool = False) -> list[str]:
    for entry in journal:
        entry.in_flight = True
    return [entry.request.request_id for entry in journal.crashed(killed=killed)]


def test_two_crashes_without_progress_are_proof() -> None:
    journal = Journal()
    journal.add(request("a"))
    journal.add(request("b"))
    assert crash(journal) == []
    journal.record(TokenOutput(request_id="b", token_ids=(1,)))
    assert crash(journal) == ["a"]
    assert [entry.request.request_id for entry in journal] == ["b"]


def test_only_requests_the_engine_held_are_blamed() -> None:
    journal = Journal()
    journal.add(request("a"))
    assert journal.crashed(killed=False) == []
    assert journal.crashed(killed=False) == []
    assert len(journal) == 1


def test_a_kill_from_outside_is_blamed_more_slowly() -> None:
    journal = Journal()
    journal.add(request("a"))
    assert crash(journal, killed=True) == []
    assert crash(journal, killed=True) == []
    assert crash(journal, killed=True) == ["a"]

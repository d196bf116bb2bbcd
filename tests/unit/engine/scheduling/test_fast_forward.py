"""Steps that nobody computes: how many are skipped, and when none is. `property/test_leap.py` has the rest."""

from __future__ import annotations

from math import inf

import pytest

from support.fake_executor import Run, new_run, request


def decoding(**limits: object) -> Run:
    """Two requests behind their prompts of 8 tokens, with one output token each; a step has taken a second."""
    run = new_run(**{"step_log": 0, **limits})
    for name in ("a", "b"):
        run.add(request(name, 8, 100, penalty=0.0))
    run.one_step()
    return run


def test_decodes_are_skipped_until_the_first_request_has_its_last_token_left() -> None:
    run = decoding()
    found = run.scheduler.skip_decodes(
        1.0, inf, num_left=lambda name: 5 if name == "a" else 9, seconds=lambda decodes, context: decodes + context
    )
    assert found is not None
    assert found.request_ids == ["a", "b"]
    # Two decodes; of 9 tokens each first.
    assert found.ends == [1.0 + 20, 1.0 + 20 + 22, 1.0 + 20 + 22 + 24, 1.0 + 20 + 22 + 24 + 26]
    assert [len(sequence.token_ids) for sequence in run.scheduler.roster.sequences.values()] == [13, 13]
    run.scheduler.check_invariants()


def test_a_step_that_begins_when_the_next_request_is_due_is_not_skipped() -> None:
    run = decoding()
    found = run.scheduler.skip_decodes(1.0, 4.0, num_left=lambda _: 50, seconds=lambda *_: 1.0)
    assert found is not None
    assert found.ends == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("why", ["step log", "step in flight", "one token left"])
def test_nothing_is_skipped_where_single_steps_would_leave_something_else(why: str) -> None:
    run = decoding(step_log=64 if why == "step log" else 0)
    if why == "step in flight":
        assert run.scheduler.schedule(1.0) is not None
    before = [list(sequence.token_ids) for sequence in run.scheduler.roster.sequences.values()]
    num_left = 1 if why == "one token left" else 50
    assert run.scheduler.skip_decodes(1.0, inf, num_left=lambda _: num_left, seconds=lambda *_: 1.0) is None
    assert run.scheduler.skip_chunks(1.0, inf, num_left=lambda _: num_left, seconds=lambda *_: 1.0) is None
    assert [list(sequence.token_ids) for sequence in run.scheduler.roster.sequences.values()] == before

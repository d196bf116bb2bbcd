"""Requests whose clients do not read: what recovery does with them while they are held."""

from quire_server.engine.recovery import JournalEntry, Recovery
from support.recovering import crash, progress, request, sent, serving


def test_what_is_held_is_sent_to_no_engine_until_it_is_released() -> None:
    recovery = serving("a", "b")
    progress(recovery, "a", "b")
    assert recovery.hold("a") is True  # the engine has it
    crash(recovery)
    assert sent(recovery) == ["b"]
    assert progress(recovery, "b") == ["b"]
    assert sent(recovery) == []
    assert recovery.release("a") is False  # the new engine has never heard of it
    assert sent(recovery) == ["a"]
    assert recovery.hold("a") is True
    assert recovery.release("a") is True
    assert sent(recovery) == [], "the engine has it"


def test_a_request_on_probation_that_is_held_lets_others_go_on() -> None:
    recovery = serving("a", "b")
    crash(recovery)
    assert sent(recovery) == ["a"]
    assert recovery.hold("a") is True
    assert sent(recovery) == ["b"]


def test_what_is_held_before_it_was_sent_is_sent_once() -> None:
    recovery = Recovery()
    recovery.enqueue(JournalEntry(request("a")))
    assert recovery.hold("a") is False
    assert recovery.release("a") is False
    assert sent(recovery) == ["a"]
    recovery.enqueue(JournalEntry(request("b")))
    assert recovery.hold("b") is False
    assert sent(recovery) == []
    assert recovery.forget("b") is False
    assert recovery.release("b") is False
    assert recovery.hold("b") is False

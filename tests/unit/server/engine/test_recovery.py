"""Recovery by plain calls: what is sent again, in which order, and whom a crash is blamed on."""

from collections.abc import Iterable

from quire_engine.contract.types import MODEL_FAILED, TokenOutput
from quire_server.engine.recovery import REMEMBERED_SECONDS, STRIKES, JournalEntry, Loss, Recovery
from support.recovering import crash, progress, request, sent, serving, step


def recovers(recovery: Recovery, names: Iterable[str]) -> None:
    """Every one of them is sent alone, and gets its token."""
    for name in names:
        assert sent(recovery) == [name]
        assert progress(recovery, name) == [name]
    assert sent(recovery) == []


def test_what_arrives_without_an_engine_is_sent_in_order_of_arrival() -> None:
    recovery = Recovery()
    for name in "abc":
        recovery.enqueue(JournalEntry(request(name)))
    assert recovery.forget("b") is False
    assert sent(recovery) == ["a", "c"]
    assert recovery.forget("c") is True  # the engine has it


def test_a_replayed_request_goes_on_where_it_was() -> None:
    recovery = serving("a")
    progress(recovery, "a")
    crash(recovery)
    resumed = recovery.next_request()
    assert resumed is not None
    assert resumed.resumed_token_ids == ((5,),)


def test_outputs_of_aborted_and_finished_requests_are_left_out() -> None:
    recovery = serving("a", "b")
    assert recovery.forget("b") is True
    assert recovery.forget("b") is False
    assert progress(recovery, "a", "b") == ["a"]
    last = step(TokenOutput(request_id="a", finish="length"))
    assert recovery.record(last) is last
    assert len(recovery) == 0
    assert progress(recovery, "a") == []


def test_a_request_of_several_choices_lives_until_the_last_has_finished() -> None:
    recovery = Recovery()
    recovery.admit(JournalEntry(request("a", n=2)))
    recovery.record(step(TokenOutput(request_id="a", choice=1, finish="length")))
    assert len(recovery) == 1
    recovery.record(step(TokenOutput(request_id="a", choice=0, finish="length")))
    assert len(recovery) == 0


def test_suspects_run_one_at_a_time_until_each_has_made_progress() -> None:
    recovery = serving("a", "b", "c")
    crash(recovery)
    recovers(recovery, "abc")


def test_a_newcomer_waits_behind_the_suspects_it_found() -> None:
    recovery = serving("a", "b")
    crash(recovery)
    recovery.enqueue(JournalEntry(request("new")))
    assert sent(recovery) == ["a"]
    progress(recovery, "a")
    assert sent(recovery) == ["b"]
    progress(recovery, "b")
    assert sent(recovery) == ["new"]


def test_a_finish_without_a_token_is_progress_too() -> None:
    recovery = serving("a", "b")
    crash(recovery)
    assert sent(recovery) == ["a"]
    recovery.record(step(TokenOutput(request_id="a", finish="error", error="it does not fit")))
    assert sent(recovery) == ["b"]


def test_the_second_crash_has_one_culprit() -> None:
    recovery = serving("a", "bad", "b")
    assert crash(recovery) == []
    assert sent(recovery) == ["a"]
    progress(recovery, "a")
    assert sent(recovery) == ["bad"]
    assert crash(recovery) == ["bad"]
    assert len(recovery) == 2
    recovers(recovery, "ab")


def test_progress_and_time_clear_a_name() -> None:
    recovery = serving("a")
    for number in range(5):
        assert crash(recovery, now=number * REMEMBERED_SECONDS) == []
        recovers(recovery, "a")


def test_who_crashes_a_little_later_each_time_is_on_probation_for_longer_and_found() -> None:
    """It always brings three tokens before it crashes, and nobody is blamed who only was there."""
    recovery = serving("a", "bad", "b")
    for number in range(5):
        guilty = crash(recovery, now=float(number))
        if guilty:
            break
        waits = True
        while waits and (resumed := recovery.next_request()) is not None:
            waits = resumed.request_id != "bad"
            for _ in range(600 if waits else 3):
                progress(recovery, resumed.request_id)
    assert guilty == ["bad"]
    assert number < 5  # within the restarts that a server has by default
    recovers(recovery, "ab")


def test_what_a_culprit_explains_is_held_against_nobody() -> None:
    recovery = serving("a")
    for number in range(20):
        recovery.admit(JournalEntry(request(f"bad{number}")))
        assert crash(recovery, now=2.0 * number) == []
        assert sent(recovery) == ["a"]
        progress(recovery, "a")
        assert sent(recovery) == [f"bad{number}"]
        assert crash(recovery, now=2.0 * number + 1) == [f"bad{number}"]
        recovers(recovery, "a")


def test_a_newcomer_is_told_to_wait_while_there_are_suspects() -> None:
    recovery = serving("a")
    assert not recovery.has_suspects
    crash(recovery)
    assert recovery.has_suspects
    assert sent(recovery) == ["a"]
    assert recovery.has_suspects
    progress(recovery, "a")
    assert not recovery.has_suspects


def test_nobody_is_sent_before_the_engine_has_answered_the_probe() -> None:
    recovery = serving("a")
    crash(recovery)
    probe = recovery.prove()
    assert recovery.has_suspects
    assert sent(recovery) == []
    assert progress(recovery, probe.request_id) == []  # nobody has asked for it
    assert sent(recovery) == ["a"]


def test_a_crash_on_the_probe_is_held_against_nobody() -> None:
    recovery = serving("a")
    crash(recovery)
    for _ in range(5):
        recovery.prove()
        assert crash(recovery) == []
    assert sent(recovery) == ["a"]


def test_a_request_that_made_a_step_raise_is_told_of_once() -> None:
    recovery = serving("a", "b")
    failed = TokenOutput(request_id="a", finish="error", error=f"{MODEL_FAILED} (ValueError)", culprit=True)
    other = TokenOutput(request_id="b", finish="error", error="the model produced a non-finite value", culprit=True)
    recovery.record(step(failed, other))
    assert [each.request_id for each in recovery.culprits] == ["a"]


def test_waiting_requests_can_be_dropped_by_what_they_are() -> None:
    recovery = serving("a", "bad")
    recovery.enqueue(JournalEntry(request("twin")))
    assert [each.request.request_id for each in recovery.drop(lambda entry: entry.request.request_id != "a")] == [
        "twin"
    ]
    assert sorted(entry.request.request_id for entry in recovery.dismiss()) == ["a", "bad"]


def test_only_requests_the_engine_held_are_blamed() -> None:
    recovery = Recovery()
    recovery.enqueue(JournalEntry(request("a")))
    for _ in range(5):
        assert crash(recovery) == []
    assert sent(recovery) == ["a"]


def test_a_loss_that_others_may_have_caused_is_blamed_more_slowly() -> None:
    recovery = serving("a")
    for _ in range(3):
        assert crash(recovery, Loss.DOUBTFUL) == []
        assert sent(recovery) == ["a"]
    assert crash(recovery, Loss.DOUBTFUL) == ["a"]


def test_kills_by_others_are_held_against_nobody_until_there_are_very_many() -> None:
    recovery = serving("a", "b")
    for _ in range(STRIKES[Loss.KILL] // 2 - 1):
        assert crash(recovery, Loss.KILL) == []
        assert sent(recovery) == ["a", "b"]
    assert crash(recovery, Loss.KILL) == []
    for _ in range(STRIKES[Loss.KILL] // 2 - 1):
        assert sent(recovery) == ["a"]
        assert crash(recovery, Loss.KILL) == []
    assert sent(recovery) == ["a"]
    assert crash(recovery, Loss.KILL) == ["a"]
    recovers(recovery, "b")


def test_a_token_ends_the_count_of_kills() -> None:
    recovery = serving("a")
    for _ in range(3 * STRIKES[Loss.KILL]):
        assert crash(recovery, Loss.KILL) == []
        assert sent(recovery) == ["a"]
        progress(recovery, "a")


def test_after_one_loss_in_doubt_all_go_on_together() -> None:
    recovery = serving("a", "b", "c")
    assert crash(recovery, Loss.DOUBTFUL) == []
    assert sent(recovery) == ["a", "b", "c"]
    assert crash(recovery) == []  # together: whose doing it was is not known
    assert sent(recovery) == ["a"]
    assert crash(recovery) == ["a"]
    recovers(recovery, "bc")


def test_a_second_one_makes_suspects_of_them() -> None:
    recovery = serving("a", "b")
    assert crash(recovery, Loss.DOUBTFUL) == []
    assert sent(recovery) == ["a", "b"]
    assert crash(recovery, Loss.DOUBTFUL) == []
    assert sent(recovery) == ["a"]
    assert crash(recovery, Loss.DOUBTFUL) == []  # alone for the first time: an operator may have killed it again
    assert sent(recovery) == ["a"]
    assert crash(recovery, Loss.DOUBTFUL) == ["a"]
    recovers(recovery, "b")


def test_a_suspect_aborted_before_its_turn_is_passed_over() -> None:
    recovery = serving("a", "b", "c")
    crash(recovery)
    recovery.forget("a")
    recovers(recovery, "bc")


def test_the_next_suspect_follows_one_that_is_aborted_on_probation() -> None:
    recovery = serving("a", "b")
    crash(recovery)
    assert sent(recovery) == ["a"]
    assert recovery.forget("a") is True
    assert sent(recovery) == ["b"]


def test_a_crash_that_an_aborted_suspect_may_have_caused_proves_nothing() -> None:
    recovery = serving("bad", "b")
    crash(recovery)
    assert sent(recovery) == ["bad"]
    recovery.forget("bad")  # while the engine is in the middle of its step
    assert sent(recovery) == ["b"]
    assert crash(recovery) == []
    recovers(recovery, "b")


def test_the_doubt_about_an_aborted_suspect_ends_with_the_next_ones_progress() -> None:
    recovery = serving("a", "b", "bad")
    crash(recovery)
    assert sent(recovery) == ["a"]
    recovery.forget("a")
    assert sent(recovery) == ["b"]
    progress(recovery, "b")
    assert sent(recovery) == ["bad"]
    assert crash(recovery) == ["bad"]


def test_the_doubt_about_an_aborted_suspect_ends_with_its_engine() -> None:
    recovery = serving("a", "bad")
    crash(recovery)
    assert sent(recovery) == ["a"]
    recovery.forget("a")
    assert sent(recovery) == ["bad"]
    assert crash(recovery) == []
    assert sent(recovery) == ["bad"]
    assert crash(recovery) == ["bad"]


def test_dismissed_requests_are_gone() -> None:
    recovery = serving("a")
    recovery.enqueue(JournalEntry(request("b")))
    assert [entry.request.request_id for entry in recovery.dismiss()] == ["a", "b"]
    assert len(recovery) == 0
    assert recovery.next_request() is None

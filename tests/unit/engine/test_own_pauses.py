"""A watcher that was paused itself does not count the pause as silence of those that it watches."""

from __future__ import annotations

from quire_engine.own_pauses import OwnPauses


def test_silence_has_no_pause_of_ones_own_in_it() -> None:
    now = 100.0
    pauses = OwnPauses(0.5, clock=lambda: now)
    for _ in range(4):
        now += 0.5
        pauses.look()
    assert pauses.silence(heard=100.0) == 2.0, "looks in time: the other one is silent"
    now += 25.0
    pauses.look()
    assert pauses.silence(heard=100.0) == 2.5, "nothing could be heard meanwhile"
    assert pauses.silence(heard=110.0) <= 0.5, "it came while nobody read"
    for _ in range(20):
        now += 0.5
        pauses.look()
    assert pauses.silence(heard=100.0) == 12.5, "by now it could"
    assert pauses.silence(heard=now) == 0.0


def test_a_pause_is_seen_by_the_timer_that_runs_first_after_it() -> None:
    now = 100.0
    pauses = OwnPauses(0.5, clock=lambda: now)
    heard = pauses.now()
    now += 25.0
    assert pauses.silence(heard) == 0.5, "nobody has looked since the pause"
    now += 0.5
    assert pauses.silence(heard) == 1.0


def test_a_process_that_often_lacks_a_core_still_finds_a_silent_one() -> None:
    now = 100.0
    pauses = OwnPauses(0.5, clock=lambda: now)
    for _ in range(200):
        now += 1.5
        pauses.look()
    assert pauses.silence(heard=100.0) >= 50.0

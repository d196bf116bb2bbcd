"""A watcher that was paused itself gives those that it watches their whole time anew."""

from __future__ import annotations

from quire_engine.own_pauses import OwnPauses


def test_silence_counts_from_the_last_pause_of_ones_own() -> None:
    now = 100.0
    pauses = OwnPauses(0.5, clock=lambda: now)
    for _ in range(4):
        now += 0.5
        pauses.look()
    assert pauses.silence(heard=100.0) == 2.0, "looks in time: the other one is silent"
    now += 25.0
    pauses.look()
    assert pauses.silence(heard=100.0) == 0.0, "nothing could be heard meanwhile"
    for _ in range(20):
        now += 0.5
        pauses.look()
    assert pauses.silence(heard=100.0) == 10.0, "by now it could"
    assert pauses.silence(heard=now) == 0.0


def test_a_pause_is_seen_by_the_timer_that_runs_first_after_it() -> None:
    now = 100.0
    pauses = OwnPauses(0.5, clock=lambda: now)
    heard = pauses.now()
    now += 25.0
    assert pauses.silence(heard) == 0.0, "nobody has looked since the pause"
    now += 0.5
    assert pauses.silence(heard) == 0.5

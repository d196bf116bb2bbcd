"""What a long run is judged by: each detector catches a process that is broken in its way, and lets a good one pass."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import psutil
import pytest

from hostile.detectors import Answered, Sample, drift, judge, left, look, slope, unexplained
from support.covering import few

MIB = 1 << 20
LEAKS = {
    "memory": "kept.append(bytearray(1 << 20))",
    "fds": "kept.append(open('/dev/null'))",
    "threads": "thread = threading.Thread(target=time.sleep, args=(60,), daemon=True); thread.start()",
    "nothing": "bytearray(1 << 22)",
}


def samples(
    rss=lambda minute: 300.0, fds=lambda minute: 40, threads=lambda minute: 20, minutes: int = 20
) -> list[Sample]:
    """One in five seconds; `rss` in MiB by minute."""
    dice = random.Random(1)
    return [
        Sample(
            at=at,
            rss=int((rss(at / 60) + dice.uniform(0, 3)) * MIB),
            fds=fds(at / 60) + dice.randrange(2),
            threads=threads(at / 60),
        )
        for at in range(0, minutes * 60, 5)
    ]


def faults(taken: list[Sample], times: list[tuple[float, float]] = ()) -> list[str]:
    return list(judge(taken, times, warm_up=300))


def test_what_is_well_passes() -> None:
    assert faults(samples()) == []
    assert faults(samples(rss=lambda minute: 300 + (200 if 8 < minute < 9 else 0))) == []  # work that came and went
    assert faults(samples(rss=lambda minute: 100 + 40 * min(minute, 5))) == []  # it warms up
    assert faults(samples(rss=lambda minute: 310 if minute > 12 else 300)) == []  # a small step
    assert faults(samples(rss=lambda minute: 300 + 0.5 * minute)) == []


@pytest.mark.parametrize("leak", [1.5, 4.0, 100.0])
def test_growing_memory_is_caught(leak: float) -> None:
    (fault,) = faults(samples(rss=lambda minute: 300 + leak * minute))
    assert fault.startswith("memory grows by")


def test_a_leak_below_spikes_is_caught() -> None:
    assert faults(samples(rss=lambda minute: 300 + 2 * minute + 150 * (int(minute * 12) % 5 == 0)))


def test_descriptors_and_threads_that_are_left_are_caught() -> None:
    assert "fds more" in faults(samples(fds=lambda minute: 40 + int(minute)))[0]
    assert "threads more" in faults(samples(threads=lambda minute: 20 + int(minute) // 2))[0]
    assert left([5, 5, 6], [5, 6, 5]) == 0


def test_answers_that_slow_down_are_caught() -> None:
    steady = [(float(at), 0.020 + 0.002 * (at % 3)) for at in range(0, 1200)]
    assert faults(samples(), steady) == []
    slower = [(at, seconds * (1 + at / 4000)) for at, seconds in steady]
    assert "slower at the end" in faults(samples(), slower)[0]
    assert drift([1.0, 1.0], [1.2, 1.2]) == pytest.approx(0.2)


def test_too_short_a_run_proves_nothing() -> None:
    assert "too short" in faults(samples(minutes=5))[0]


def answered(status: int, at: float = 100.0, **more: object) -> Answered:
    return Answered(kind="whole", at=at, status=status, **more)


def test_errors_that_nobody_asked_for_are_caught() -> None:
    def told(*answers: Answered) -> list[str]:
        return list(unexplained(answers, [95.0], pardon=15))

    assert told(answered(200), answered(429), answered(499), answered(400)) == []
    assert told(answered(503, retry_after=True), answered(504, had_deadline=True)) == []
    assert len(told(answered(500), answered(502), answered(0))) == 3
    assert len(told(answered(503))) == 1, "it does not say when to come back"
    assert len(told(answered(503, at=111.0, retry_after=True))) == 1, "long after the kill"
    assert len(told(answered(503, at=94.0, retry_after=True))) == 1, "before it"
    assert len(told(answered(504))) == 1
    assert told(answered(200, fault="another text")) == ["whole at 100 s: another text"]


@pytest.mark.parametrize("what", few(LEAKS, *list(LEAKS)[:1]))
def test_a_process_that_leaks_is_seen_to(what: str) -> None:
    """The whole way, from a process that is broken: a hundred looks in two seconds, as if each were a second."""
    script = (
        f"import threading, time\nkept = []\nprint(flush=True)\nwhile True:\n    {LEAKS[what]}\n    time.sleep(0.02)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            process = psutil.Process(child.pid)
            taken = []
            for second in range(60):
                taken.append(look(process, float(second)))
                time.sleep(0.02)
        finally:
            child.kill()
    found = "; ".join(judge(taken, (), warm_up=10))
    said = {"memory": "memory grows", "fds": "fds more", "threads": "threads more", "nothing": ""}[what]
    assert said in found
    assert (found == "") == (what == "nothing")


def test_a_slope_is_per_minute() -> None:
    assert slope([(0.0, 0.0), (30.0, 5.0), (60.0, 10.0)]) == pytest.approx(10.0)
    assert slope([(0.0, 1.0)]) == 0.0

"""What a long run must not show, found in samples of it: growing memory, handles that are left, slower answers.

Promises: a process that needs memory while it works, and gives it back, is not taken for one that leaks; each
detector has a broken process in `tests/unit/hostile/test_soak_detectors.py` that it must catch. Must not know: servers.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import psutil

SLOPE_BYTES = 1 << 20  # a minute
HANDLES = 2  # file descriptors and threads that may be more at the end
DRIFT = 0.10  # of the median answer's time
_MOST_POINTS = 240  # slopes are taken between all pairs
_MINUTE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a process and its children, but for those that are named apart."""

    at: float  # seconds
    rss: int  # bytes
    fds: int
    threads: int
    store: int = 0  # bytes of the server's own files


def look(process: psutil.Process, at: float, *, without: Iterable[int] = (), store: int = 0) -> Sample:
    """All of it that is alive; a child that ends meanwhile counts for what was seen of it."""
    apart = set(without)
    rss = fds = threads = 0
    for each in (process, *process.children(recursive=True)):
        if each.pid in apart:
            continue
        try:
            with each.oneshot():
                rss, threads = rss + each.memory_info().rss, threads + each.num_threads()
                fds += each.num_fds()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return Sample(at=at, rss=rss, fds=fds, threads=threads, store=store)


def slope(samples: Sequence[tuple[float, float]]) -> float:
    """How fast a value grows, per minute: the median of the slopes between all pairs, which no spike moves."""
    step = max(1, -(-len(samples) // _MOST_POINTS))
    points = samples[::step]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for i, earlier in enumerate(points)
        for later in points[i + 1 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) * _MINUTE if slopes else 0.0


def left(before: Sequence[int], after: Sequence[int]) -> float:
    """How many more there are than before, as the median of each."""
    return statistics.median(after) - statistics.median(before)


def drift(first: Sequence[float], last: Sequence[float]) -> float:
    """How much slower the median has become; 0.1 is a tenth."""
    return statistics.median(last) / statistics.median(first) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request of the run, as its client saw it."""

    kind: str
    at: float
    status: int  # 0: broken off by the server
    fault: str = ""  # what was wrong with it, in words
    retry_after: bool = False
    had_deadline: bool = False


def unexplained(answers: Iterable[Answered], kills: Sequence[float], *, pardon: float) -> Iterator[str]:
    """Faults, and server errors that nobody has asked for.

    A 503 that says when to come back is right within `pardon` seconds of a kill, a 504 where a deadline was set.
    """
    for answer in answers:
        is_pardoned = answer.status == 503 and answer.retry_after and any(0 <= answer.at - at < pardon for at in kills)
        is_pardoned = is_pardoned or (answer.status == 504 and answer.had_deadline)
        if answer.fault:
            yield f"{answer.kind} at {answer.at:.0f} s: {answer.fault}"
        elif (answer.status >= 500 or answer.status == 0) and not is_pardoned:
            yield f"{answer.kind} at {answer.at:.0f} s: {answer.status or 'broken off'}"


def judge(samples: Sequence[Sample], times: Sequence[tuple[float, float]], *, warm_up: float) -> Iterator[str]:
    """What is wrong with a run by its samples and its (when, seconds) of equal requests."""
    warm = [sample for sample in samples if sample.at >= warm_up]
    if len(warm) < 8:
        yield f"only {len(warm)} samples after the warm-up: too short to say anything"
        return
    quarter = len(warm) // 4
    grows = slope([(sample.at, sample.rss) for sample in warm])
    if grows > SLOPE_BYTES:
        yield f"memory grows by {grows / (1 << 20):.2f} MiB a minute"
    if (stored := slope([(sample.at, sample.store) for sample in warm])) > SLOPE_BYTES:
        yield f"the server's files grow by {stored / (1 << 20):.2f} MiB a minute"
    for name in ("fds", "threads"):
        more = left([getattr(each, name) for each in warm[:quarter]], [getattr(each, name) for each in warm[-quarter:]])
        if more > HANDLES:
            yield f"{more:g} {name} more at the end"
    timed = [seconds for at, seconds in times if at >= warm_up]
    if len(timed) >= 8 and (slower := drift(timed[: len(timed) // 4], timed[-(len(timed) // 4) :])) > DRIFT:
        yield f"the median answer is {slower:.0%} slower at the end"

"""A sample of all totals, and the rates, quantiles and other values between two samples.

Promises: rates, quantiles and Little's law as Prometheus would compute them from the same numbers. Must not know:
clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Totals since the start, except `kv_waited` and `at`."""

    at: float  # seconds on a monotonic clock
    ttft: tuple[int, ...]  # counts of the histograms' buckets
    itl: tuple[int, ...]
    stalls: tuple[int, ...]
    kv_usage_seconds: float = 0  # used share of the pool, 0 to 1, integrated over time
    kv_waited: float = 0  # seconds that the queue's head has been waiting for KV blocks
    kv_wait_seconds: float = 0
    accepted: int = 0  # sequences
    departed: int = 0  # sequences
    seconds_in_system: float = 0  # sum over departed sequences
    sequence_seconds: float = 0  # sequences in the system, integrated over time
    finished: float = 0  # requests that were completed
    rejected: float = 0
    failed: float = 0
    restarts: float = 0
    preempted: float = 0
    generated: float = 0
    steps: float = 0
    busy_seconds: float = 0  # of engines, in steps
    engine_seconds: float = 0  # the engines, integrated over time
    prefilled: float = 0
    decoded: float = 0
    padded: float = 0
    static_useful: float = 0
    static_padding: float = 0
    guessed: float = 0  # tokens, computed behind decodes
    guessed_right: float = 0
    undrafted: tuple[float, ...] = ()  # slices of steps without guesses, by cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Little:
    """Little's law: `in_system` should be `arrivals` times `seconds`."""

    in_system: float  # sequences, mean over time
    arrivals: float  # sequences a second
    seconds: float  # mean time in the system over departed sequences

    @property
    def residual(self) -> float:
        """The difference of both sides relative to the larger one: -1 to 1, and 0 while idle."""
        expected = self.arrivals * self.seconds
        larger = max(self.in_system, expected)
        return (self.in_system - expected) / larger if larger > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time between two samples."""

    first: Sample
    last: Sample

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    def gain(self, name: str) -> float:
        """The growth of a total."""
        return float(getattr(self.last, name) - getattr(self.first, name))

    def rate(self, name: str) -> float:
        """The growth of a total per second; 0 in an empty window."""
        return self.gain(name) / self.seconds if self.seconds > 0 else 0.0

    def quantile(self, name: str, bounds: Sequence[float], q: float) -> float | None:
        """The quantile of a histogram's observations in the window; None without observations."""
        counts = [b - a for a, b in zip(getattr(self.first, name), getattr(self.last, name), strict=True)]
        return quantile(bounds, counts, q)

    @property
    def little(self) -> Little:
        departed = self.gain("departed")
        return Little(
            in_system=self.rate("sequence_seconds"),
            arrivals=self.rate("accepted"),
            seconds=self.gain("seconds_in_system") / departed if departed else 0.0,
        )

    @property
    def busy(self) -> float:
        """The share of the engines' time that their steps took, 0 to 1: a step counts when it has ended."""
        existed = self.gain("engine_seconds")
        return min(self.gain("busy_seconds") / existed, 1.0) if existed > 0 else 0.0

    @property
    def static_efficiency(self) -> float:
        """The share of used token slots under static batching; 1 without slots."""
        useful = self.gain("static_useful")
        reserved = useful + self.gain("static_padding")
        return useful / reserved if reserved else 1.0

    @property
    def efficiency(self) -> float:
        """The share of rows in the computed batches that hold a token, not padding; 1 without rows."""
        computed = self.gain("prefilled") + self.gain("decoded")
        rows = computed + self.gain("padded")
        return computed / rows if rows else 1.0


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Interpolate like PromQL's histogram_quantile: the last bound for values above it; None without counts."""
    total = sum(counts)
    if total <= 0:
        return None
    rank, below = q * total, 0
    for index, count in enumerate(counts):
        if below + count >= rank and count:
            if index == len(bounds):
                return float(bounds[-1])
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * (rank - below) / count
        below += count
    return float(bounds[-1])

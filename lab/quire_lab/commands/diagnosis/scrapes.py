"""Several scrapes of a server's /metrics: differences of counters, means of gauges, quantiles.

Promises: a missing metric reads as 0 or None, never as an error; a counter that fell was reset. Must not know: HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_engine.cost_model import CostModel

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """The samples of one scrape."""

    at: float  # seconds on the reader's clock
    samples: dict[str, dict[Labels, float]]

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over all samples that have these labels; None if there are none."""
        wanted = set(labels.items())
        found = [value for theirs, value in self.samples.get(name, {}).items() if wanted <= set(theirs)]
        return sum(found) if found else None

    def label(self, name: str, label: str) -> str:
        """A label's value of an info metric; empty if there is none."""
        for labels, value in self.samples.get(name, {}).items():
            if value:
                return dict(labels).get(label, "")
        return ""


def read_scrape(text: str, at: float) -> Scrape:
    """Parse the text format. Lines that are not samples are ignored."""
    samples: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        found = None if line.startswith("#") else _SAMPLE.match(line.strip())
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        labels = tuple(sorted((name, value_) for name, value_ in _LABEL.findall(found[2] or "")))
        samples.setdefault(found[1], {})[labels] = value
    return Scrape(at=at, samples=samples)


class Window:
    """The time from the first scrape to the last, and what else is known of it.

    `cost`: the calibration of the model that serves. `takers`: how often a request was preempted for each of these.
    """

    def __init__(
        self, scrapes: Sequence[Scrape], *, cost: CostModel | None = None, takers: Mapping[str, int] | None = None
    ) -> None:
        self.cost = cost
        self.takers = takers or {}
        self._scrapes = scrapes
        self.seconds = scrapes[-1].at - scrapes[0].at
        self.last = scrapes[-1]

    def delta(self, name: str, **labels: str) -> float:
        """The growth of a counter; 0 if it is missing."""
        before, after = self._scrapes[0].total(name, **labels), self.last.total(name, **labels)
        if after is None:
            return 0.0
        return after - before if before is not None and before <= after else after

    def gauge(self, name: str, **labels: str) -> float:
        """The mean of a gauge over the scrapes; 0 if it is missing."""
        values = [value for scrape in self._scrapes if (value := scrape.total(name, **labels)) is not None]
        return sum(values) / len(values) if values else 0.0

    def count(self, name: str) -> float:
        """The number of a histogram's observations."""
        return self.delta(f"{name}_count")

    def mean(self, name: str) -> float | None:
        """The mean of a histogram's observations; None without an observation."""
        count = self.count(name)
        return self.delta(f"{name}_sum") / count if count else None

    def quantile(self, name: str, share: float) -> float | None:
        """Interpolated inside of its bucket, as Prometheus does; None without an observation."""
        bounds = self._buckets(name)
        total = bounds[-1][1] if bounds else 0.0
        if not total:
            return None
        rank, low, below = share * total, 0.0, 0.0
        for bound, count in bounds:
            if count >= rank:
                if bound == float("inf"):
                    return low
                return low + (bound - low) * ((rank - below) / (count - below) if count > below else 0.0)
            low, below = bound, count
        return low

    def _buckets(self, name: str) -> list[tuple[float, float]]:
        """(upper bound, observations up to it) in the window."""
        bounds: dict[float, float] = {}
        for scrape, sign in ((self.last, 1.0), (self._scrapes[0], -1.0)):
            for labels, value in scrape.samples.get(f"{name}_bucket", {}).items():
                bound = float(dict(labels).get("le", "inf"))
                bounds[bound] = bounds.get(bound, 0.0) + sign * value
        counts = sorted(bounds.items())
        if any(count < 0 for _, count in counts):  # the server was restarted meanwhile
            return Window([Scrape(at=self.last.at, samples={}), self.last])._buckets(name)
        return counts

"""The counts of one API server, for the metrics of the whole server, which the main process has.

Promises: each count is handed over once, and added once; what an API server that ended had handed over stays.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from quire_server.metrics.metric_values import Counter, Histogram
from quire_server.metrics.metrics import Metrics
from quire_server.metrics.occupancy import Occupancy, StaticBatch, StaticBatching
from quire_server.metrics.request_record import Load, RequestBoard, RequestRow
from quire_server.metrics.usage import UsageBook

MOST_ROWS = 64  # unfinished requests that are shown one by one
Labels = tuple[str, ...]


@dataclass(slots=True, kw_only=True)
class Counts:
    """The counts since the last time, and the gauges of now. Lists are in the order of `Metrics.shared`."""

    counters: list[list[tuple[Labels, float]]] = field(default_factory=list)  # what each has grown by
    histograms: list[tuple[list[int], float] | None] = field(default_factory=list)  # None: nothing new
    by_label: list[dict[str, tuple[list[int], float]]] = field(default_factory=list)
    gauges: list[float] = field(default_factory=list)
    usage: dict[str, tuple[int, int]] = field(default_factory=dict)  # cached and output tokens, by account
    arrived: int = 0  # sequences
    departed: list[tuple[int, float]] = field(default_factory=list)  # sequences, with their seconds
    joined: list[tuple[int, int, int]] = field(default_factory=list)  # number, sequences, tokens
    left: list[tuple[int, list[int]]] = field(default_factory=list)  # number, tokens of each sequence
    live: list[RequestRow] = field(default_factory=list)  # the oldest
    num_live: int = 0
    ended: list[RequestRow] = field(default_factory=list)


class _UsageNotes(UsageBook):
    """Notes what is to be counted, instead of counting it. Prompts are counted where they get their places."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, tuple[int, int]] = {}

    def add(self, tenant: str, *, requests: int = 0, prompt: int = 0, cached: int = 0, output: int = 0) -> None:  # noqa: ARG002
        was = self.notes.get(tenant, (0, 0))
        self.notes[tenant] = was[0] + cached, was[1] + output


class _OccupancyNotes(Occupancy):
    def __init__(self) -> None:
        super().__init__()
        self.arrived = 0
        self.left: list[tuple[int, float]] = []

    def arrive(self, n: int) -> None:
        self.arrived += n

    def leave(self, n: int, seconds: float) -> None:
        self.left.append((n, seconds))


@dataclass(slots=True, kw_only=True)
class _NumberedBatch(StaticBatch):
    number: int = 0


class _BatchNotes(StaticBatching):
    def __init__(self, slots: Counter) -> None:
        super().__init__(slots)
        self.joined: list[tuple[int, int, int]] = []
        self.ended: list[tuple[int, list[int]]] = []
        self._number = 0

    def join(self, n: int, num_tokens: int) -> StaticBatch:
        self._number += 1
        self.joined.append((self._number, n, num_tokens))
        return _NumberedBatch(number=self._number)

    def leave(self, batch: StaticBatch, generated: list[int]) -> None:
        if isinstance(batch, _NumberedBatch):
            self.ended.append((batch.number, list(generated)))


class _BoardNotes(RequestBoard):
    def __init__(self) -> None:
        super().__init__()
        self.new: list[RequestRow] = []

    def end(self, number: int) -> None:
        row = self._live.pop(number, None)
        if row is not None:
            self.new.append(row())


class Tally:
    """An API server's metrics, handed over piece by piece."""

    def __init__(self, metrics: Metrics) -> None:
        """Make `metrics` note what belongs to all from now on: usage, occupancy, batches and the board."""
        self._metrics = metrics
        self._usage, self._occupancy, self._board = _UsageNotes(), _OccupancyNotes(), _BoardNotes()
        self._batches = _BatchNotes(Counter(()))
        metrics.load = Load(self._occupancy, self._batches, self._board, self._usage)
        self._counters: list[dict[Labels, float]] = [{} for _ in metrics.shared.counters]
        self._histograms = [_Seen() for _ in metrics.shared.histograms]
        self._by_label: list[dict[str, _Seen]] = [{} for _ in metrics.shared.by_label]

    def take(self) -> Counts:
        """The counts since the last call."""
        shared = self._metrics.shared
        self._metrics.read_gauges()
        counts = Counts(
            counters=[_grown(each, seen) for each, seen in zip(shared.counters, self._counters, strict=True)],
            histograms=[seen.grown(each) for each, seen in zip(shared.histograms, self._histograms, strict=True)],
            gauges=[each.get() for each in shared.gauges],
            usage=self._usage.notes,
            arrived=self._occupancy.arrived,
            departed=self._occupancy.left,
            joined=self._batches.joined,
            left=self._batches.ended,
            live=self._board.live(MOST_ROWS),
            num_live=self._board.num_live,
            ended=self._board.new,
        )
        for each, known in zip(shared.by_label, self._by_label, strict=True):
            news = {label: known.setdefault(label, _Seen()).grown(one) for (label,), one in each.children.items()}
            counts.by_label.append({label: grown for label, grown in news.items() if grown is not None})
        self._usage.notes, self._board.new = {}, []
        self._occupancy.arrived, self._occupancy.left = 0, []
        self._batches.joined, self._batches.ended = [], []
        return counts


class _Seen:
    """A histogram as it was handed over."""

    def __init__(self) -> None:
        self._counts: list[int] = []
        self._sum = 0.0

    def grown(self, histogram: Histogram) -> tuple[list[int], float] | None:
        before = self._counts or [0] * len(histogram.counts)
        if histogram.counts == before:
            return None
        grown = [now - was for now, was in zip(histogram.counts, before, strict=True)], histogram.sum - self._sum
        self._counts, self._sum = list(histogram.counts), histogram.sum
        return grown


def _grown(counter: Counter, seen: dict[Labels, float]) -> list[tuple[Labels, float]]:
    grown = [(labels, value - seen.get(labels, 0.0)) for labels, value in counter.values.items()]
    seen.update(counter.values)
    return [(labels, more) for labels, more in grown if more]


class Guest:
    """The part of one API server, while it lives, in the metrics of the whole server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._gauges: list[float] = []
        self._batches: dict[int, tuple[StaticBatch, int]] = {}  # with the number of sequences
        self._arrived: int = 0  # sequences that have not departed
        self._since = time.monotonic()
        metrics.guests.append(self)

    @property
    def gauges(self) -> list[float]:
        """The server's gauges, in the order of `Metrics.shared`; empty: it has told none yet."""
        return self._gauges

    def add(self, counts: Counts) -> None:
        """Count what it has counted."""
        shared, load = self._metrics.shared, self._metrics.load
        self._gauges = counts.gauges
        for counter, grown in zip(shared.counters, counts.counters, strict=True):
            for labels, more in grown:
                counter.inc(more, *labels)
        for histogram, news in zip(shared.histograms, counts.histograms, strict=True):
            _add(histogram, news)
        for family, by_label in zip(shared.by_label, counts.by_label, strict=True):
            for label, more_of_it in by_label.items():
                _add(family.child(label), more_of_it)
        for account, (cached, output) in counts.usage.items():
            load.usage.add(account, cached=cached, output=output)
        load.occupancy.arrive(counts.arrived)
        self._arrived += counts.arrived
        for n, seconds in counts.departed:
            load.occupancy.leave(n, seconds)
            self._arrived -= n
        for number, n, tokens in counts.joined:
            self._batches[number] = load.static.join(n, tokens), n
        for number, generated in counts.left:
            batch, _ = self._batches.pop(number)
            load.static.leave(batch, generated)
        load.board.show_guest(id(self), counts.live, counts.num_live)
        load.board.ended.extend(counts.ended)

    def close(self, num_live: int) -> None:
        """The API server is gone, with so many requests that had not ended: these count as aborted."""
        metrics, load = self._metrics, self._metrics.load
        metrics.guests.remove(self)
        metrics.aborted(num_live)
        if self._arrived:
            load.occupancy.leave(self._arrived, 0.0)
        for batch, n in self._batches.values():
            load.static.leave(batch, [0] * n)
        load.board.show_guest(id(self), [], 0)


def _add(histogram: Histogram, news: tuple[list[int], float] | None) -> None:
    if news is None:
        return
    counts, total = news
    histogram.counts = [was + more for was, more in zip(histogram.counts, counts, strict=True)]
    histogram.sum += total

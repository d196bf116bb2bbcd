"""Counters, gauges and histograms as plain Python values, exported under one or two names at scrape time.

Promises: an update costs well under a microsecond and takes no lock; an alias has the same values as its original. All
updates come from the event loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Counter:
    """A number that only grows, for each combination of label values."""

    __slots__ = ("values",)

    def __init__(self, children: Sequence[tuple[str, ...]]) -> None:
        self.values: dict[tuple[str, ...], float] = dict.fromkeys(children, 0.0)

    def inc(self, amount: float = 1.0, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def get(self, *labels: str) -> float:
        return self.values.get(labels, 0.0)


class Gauge:
    """A number that is set from state, never adjusted."""

    __slots__ = ("values",)

    def __init__(self, children: Sequence[tuple[str, ...]]) -> None:
        self.values: dict[tuple[str, ...], float] = dict.fromkeys(children, 0.0)

    def set(self, value: float, *labels: str) -> None:
        self.values[labels] = value

    def get(self, *labels: str) -> float:
        return self.values.get(labels, 0.0)


class Histogram:
    """Counts of values between bounds, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus shows them."""
        total = 0.0
        cumulative = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            cumulative.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        return cumulative


_Value = float | Mapping[str, float] | tuple[float, ...]


class Total:
    """Follows a number that falls back to 0 when its owner is replaced, or one by label, into a counter."""

    __slots__ = ("_counter", "_in_bytes", "_labels", "last")

    def __init__(self, counter: Counter, *labels: str, in_bytes: bool = False) -> None:
        """`in_bytes`: the numbers count blocks, and the counter their bytes."""
        self._counter = counter
        self._labels = labels
        self._in_bytes = in_bytes
        self.last: _Value = 0

    def advance(self, value: _Value, bytes_per_block: int) -> None:
        """Take in the number as it is now."""
        before = dict(_by_label(self.last))
        for labels, total in _by_label(value):
            last = before.get(labels, 0)
            if total != last:
                more = total - last if total > last else total
                self._counter.inc(more * bytes_per_block if self._in_bytes else more, *self._labels, *labels)
        self.last = value


def _by_label(value: _Value) -> Iterable[tuple[tuple[str, ...], float]]:
    """The numbers with their labels: of a table its keys, of a tuple its places."""
    match value:
        case Mapping():
            return [((label,), number) for label, number in value.items()]
        case tuple():
            return [((str(place),), number) for place, number in enumerate(value)]
    return [((), value)]


class Values(Collector):
    """All metrics of one server. What is exported under an alias has the label `engine` too, as vLLM's has.

    An `old` name is an alias that vLLM has given up and dashboards still read.
    A `field` is one of `EngineStats`: of a counter a total that it follows, of a gauge what it shows.
    """

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self._labels = labels
        self._alias_labels = labels | {"engine": "0"}
        self.totals: dict[str, Total] = {}  # by field
        self.shown: dict[str, Gauge] = {}  # by field
        self._exports: list[Callable[[], Metric]] = []
        registry.register(self)

    def counter(
        self,
        name: str | None,
        text: str,
        labels: Sequence[str] = (),
        *,
        children: Sequence[tuple[str, ...]] | None = None,
        alias: str | None = None,
        alias_label: str | None = None,
        old: str | None = None,
        field: str | None = None,
    ) -> Counter:
        """A counter; `name` is without the suffix `_total`, None if it is exported as an alias only.

        The `children` are exported from the start.
        """
        counter = Counter(children if children is not None else [()] if not labels else [])
        for shown, constant, names in self._names(name, alias, old, labels, alias_label):
            self._exports.append(
                _export(CounterMetricFamily, shown, text, constant=constant, labels=names, children=counter.values)
            )
        if field is not None:
            self.totals[field] = Total(counter)
        return counter

    def gauge(
        self,
        name: str | None,
        text: str,
        labels: Sequence[str] = (),
        *,
        children: Sequence[tuple[str, ...]] | None = None,
        alias: str | None = None,
        old: str | None = None,
        field: str | None = None,
    ) -> Gauge:
        """A gauge; without a `name` it is exported as an alias only."""
        gauge = Gauge(children if children is not None else [()] if not labels else [])
        for shown, constant, names in self._names(name, alias, old, labels, None):
            self._exports.append(
                _export(GaugeMetricFamily, shown, text, constant=constant, labels=names, children=gauge.values)
            )
        if field is not None:
            self.shown[field] = gauge
        return gauge

    def histogram(
        self, name: str, text: str, bounds: Sequence[float], *, alias: str | None = None, old: str | None = None
    ) -> Histogram:
        """A histogram without labels of its own."""
        histogram = Histogram(bounds)
        for shown, constant, _ in self._names(name, alias, old, (), None):
            self._exports.append(
                _export(HistogramMetricFamily, shown, text, constant=constant, labels=(), children={(): histogram})
            )
        return histogram

    def histograms(self, name: str, text: str, bounds: Sequence[float], label: str) -> HistogramByLabel:
        """Histograms by the value of one label, created on first use."""
        family = HistogramByLabel(bounds)
        children = family.children
        self._exports.append(
            _export(HistogramMetricFamily, name, text, constant=self._labels, labels=(label,), children=children)
        )
        return family

    def collect(self) -> Iterator[Metric]:
        for export in self._exports:
            yield export()

    def _names(
        self, name: str | None, alias: str | None, old: str | None, labels: Sequence[str], alias_label: str | None
    ) -> Iterator[tuple[str, dict[str, str], tuple[str, ...]]]:
        if name is not None:
            yield name, self._labels, tuple(labels)
        if alias is not None:
            yield alias, self._alias_labels, (alias_label,) if alias_label is not None else tuple(labels)
        if old is not None:
            yield old, self._alias_labels, tuple(labels)


class HistogramByLabel:
    """One histogram for each value of a label; the caller bounds the number of values."""

    __slots__ = ("_bounds", "children")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.children: dict[tuple[str, ...], Histogram] = {}

    def observe(self, value: float, label: str) -> None:
        self.child(label).observe(value)

    def child(self, label: str) -> Histogram:
        """The histogram of a value of the label."""
        histogram = self.children.get((label,))
        if histogram is None:
            histogram = self.children[(label,)] = Histogram(self._bounds)
        return histogram


def _export(
    family: type[CounterMetricFamily] | type[GaugeMetricFamily] | type[HistogramMetricFamily],
    name: str,
    text: str,
    *,
    constant: dict[str, str],
    labels: tuple[str, ...],
    children: Mapping[tuple[str, ...], float | Histogram],
) -> Callable[[], Metric]:
    def export() -> Metric:
        metric = family(name, text, labels=[*constant, *labels])
        for child, value in list(children.items()):
            sample: dict[str, Any] = {"value": value}
            if isinstance(value, Histogram):
                sample = {"buckets": value.buckets(), "sum_value": value.sum}
            metric.add_metric([*constant.values(), *child], **sample)
        return metric

    return export

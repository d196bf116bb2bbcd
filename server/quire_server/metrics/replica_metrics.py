"""The metrics of replicas; one engine alone exports none of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from quire_server.metrics.metric_values import Values

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
_MOVE = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0)


class Row(Protocol):
    """A replica as its gauges show it: `engine.replicas.ReplicaRow`."""

    @property
    def name(self) -> str: ...
    @property
    def is_up(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def streams(self) -> int: ...
    @property
    def prompt_tokens_ahead(self) -> int: ...


class Wanted(Protocol):
    """The replicas that are wanted: `quire_engine.routing.fleet.Wanted`."""

    @property
    def work(self) -> float: ...
    @property
    def at_least(self) -> int: ...


_KEPT = 0.9  # of the means that the dashboard shows, with each further first output


@dataclass(slots=True)
class _Means:
    """Seconds to first outputs of one replica, the latest counting most."""

    predicted: float
    seen: float

    def take(self, predicted: float, seen: float) -> None:
        self.predicted = _KEPT * self.predicted + (1 - _KEPT) * predicted
        self.seen = _KEPT * self.seen + (1 - _KEPT) * seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShown:
    """A replica on the dashboard."""

    name: str
    state: str  # ready, draining or away
    streams: int
    prompt_tokens_ahead: int
    predicted: float | None  # seconds to a first output, a mean of the last ones; None: there was none
    seen: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBoard:
    """All replicas, and the totals of how requests were given to them."""

    rows: tuple[ReplicaShown, ...]
    routes: dict[str, int]  # by reason
    moved: int


class ReplicaMetrics:
    """Gauges by replica, and what became of streams whose replica was lost."""

    def __init__(self, values: Values) -> None:
        self._up = values.gauge("quire_replica_up", "1 while the replica has an engine that serves.", ("replica",))
        self._draining = values.gauge(
            "quire_replica_draining", "1 while the replica takes nothing new, by an operator's order.", ("replica",)
        )
        self._streams = values.gauge("quire_replica_streams", "Unfinished requests of the replica.", ("replica",))
        self._ahead = values.gauge(
            "quire_replica_prompt_tokens_ahead",
            "Tokens of the replica's requests that have had no output from it yet.",
            ("replica",),
        )
        self._wanted = values.gauge(
            "quire_replicas_wanted",
            "Replicas that this server's own requests of the last minute ask for, at three quarters of their time, not"
            " rounded: add it up over servers that share nodes, and round that up. 0 with a single engine.",
        )
        self._at_least = values.gauge(
            "quire_replicas_wanted_at_least",
            "One more than serve now, where the predicted time to first token has been above --slo-ttft for ten"
            " seconds, else 0: of servers that share nodes take the most.",
        )
        self._decisions = values.counter(
            "quire_route_decisions",
            "Requests given to a replica, by reason: it has a part of the prompt cached, it has least ahead (load), or"
            " the request's own replica was lost or drained (moved).",
            ("why",),
        )
        self._sources = values.counter(
            "quire_kv_sources",
            "Requests given to a replica that fetches KV blocks of their prompt: from one that computes it for them"
            " (prefill), or that has it cached.",
            ("kind",),
        )
        self._moved = values.counter(
            "quire_streams_moved", "Requests that lost their replica, or were drained off it, and went on elsewhere."
        )
        self.moved = self._moved.inc
        self._means: dict[str, _Means] = {}
        self.move_seconds = values.histogram(
            "quire_move_seconds",
            "From the loss of a begun stream's replica to its next output, seconds.",
            _MOVE,
        ).observe

        self._predicted = values.histograms(
            "quire_route_predicted_ttft_seconds",
            "Predicted when a request was given to the replica, of those that have had output: seconds to it.",
            _FIRST,
            "replica",
        )
        self._seen = values.histograms(
            "quire_route_seen_ttft_seconds",
            "Of the same requests: seconds from then to their first output at the front.",
            _FIRST,
            "replica",
        )

    def answered(self, replica: str, predicted: float, seen: float) -> None:
        """A replica's first output for a request has come; seconds since it was given to it."""
        self._predicted.observe(predicted, replica)
        self._seen.observe(seen, replica)
        self._means.setdefault(replica, _Means(predicted, seen)).take(predicted, seen)

    def board(self, rows: Iterable[Row]) -> ReplicaBoard:
        """The dashboard's values; replicas that are gone are forgotten."""
        rows = list(rows)
        self._means = {row.name: self._means[row.name] for row in rows if row.name in self._means}
        shown = []
        for row in rows:
            means = self._means.get(row.name)
            shown.append(
                ReplicaShown(
                    name=row.name,
                    state="draining" if row.draining else "ready" if row.is_up else "away",
                    streams=row.streams,
                    prompt_tokens_ahead=row.prompt_tokens_ahead,
                    predicted=None if means is None else round(means.predicted, 5),
                    seen=None if means is None else round(means.seen, 5),
                )
            )
        routes = {labels[0]: int(count) for labels, count in self._decisions.values.items()}
        return ReplicaBoard(rows=tuple(shown), routes=routes, moved=int(self._moved.get()))

    def decided(self, why: str) -> None:
        """A request was given to a replica. `why` is of a fixed set."""
        self._decisions.inc(1, why)

    def sourced(self, kind: str) -> None:
        """A request's replica is to fetch blocks. `kind` is of a fixed set."""
        self._sources.inc(1, kind)

    def show(self, rows: Iterable[Row], wanted: Wanted | None) -> None:
        """Set the gauges; called at each scrape. Replicas that are gone have none. `wanted`: None with one engine."""
        for gauge in (self._up, self._draining, self._streams, self._ahead):
            gauge.values.clear()
        self._wanted.set(0.0 if wanted is None else wanted.work)
        self._at_least.set(0 if wanted is None else wanted.at_least)
        for row in rows:
            self._up.set(row.is_up, row.name)
            self._draining.set(row.draining, row.name)
            self._streams.set(row.streams, row.name)
            self._ahead.set(row.prompt_tokens_ahead, row.name)

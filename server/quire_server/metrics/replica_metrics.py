"""The metrics of replicas; one engine alone exports none of them."""

from __future__ import annotations

from collections.abc import Iterable
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
            "Replicas that the requests of the last minute ask for, at three quarters of their time, by this server's"
            " own requests: add it up over servers that share nodes. 0 with a single engine.",
        )
        self._decisions = values.counter(
            "quire_route_decisions",
            "Requests given to a replica, by reason: it has a part of the prompt cached, it has least ahead (load), or"
            " the request's own replica was lost or drained (moved).",
            ("why",),
        )
        self._moved = values.counter(
            "quire_streams_moved", "Requests that lost their replica, or were drained off it, and went on elsewhere."
        )
        self.moved = self._moved.inc
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

    def decided(self, why: str) -> None:
        """A request was given to a replica. `why` is of a fixed set."""
        self._decisions.inc(1, why)

    def show(self, rows: Iterable[Row], wanted: int) -> None:
        """Set the gauges; called at each scrape. Replicas that are gone have none."""
        for gauge in (self._up, self._draining, self._streams, self._ahead):
            gauge.values.clear()
        self._wanted.set(wanted)
        for row in rows:
            self._up.set(row.is_up, row.name)
            self._draining.set(row.draining, row.name)
            self._streams.set(row.streams, row.name)
            self._ahead.set(row.prompt_tokens_ahead, row.name)

"""A live server's step log from one step on, as a replay reads it.

Promises: every step of that time and what came between them, or BenchError.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from quire_bench.servers import BenchError
from quire_engine.contract.errors import ConfigError
from quire_lab.commands.trace import PAGE, Lines, pages
from quire_lab.facts.live import Live
from quire_lab.simulation.recorded import Recording, read_log


class _Pages:
    """The log as `quire trace` reads it, by the keys that were given."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def page(self, after: int, *, events: bool) -> dict[str, Any]:
        query = urlencode({"after": after, "limit": PAGE, "events": str(events).lower()})
        return self._live.debug(f"steps?{query}")


def recorded(live: Live, after: int) -> Recording:
    """Read what `quire trace --json --after` writes, from an idle step `after` on. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="quire-steps-") as folder:
        path = Path(folder) / "steps.jsonl"
        with path.open("w", encoding="utf-8") as file:
            lines = Lines(file)
            for page in pages(_Pages(live), after, events=True, follow=False):
                lines.page(page)
        try:
            told = read_log(path)
        except ConfigError as error:
            raise BenchError(f"the step log cannot be read: {error}") from None
    if told.first_step != after + 1:
        raise BenchError(f"step {after + 1} is forgotten already: too many others came after it")
    return told


def lengths_by_request(told: Recording) -> dict[str, int]:
    """Most tokens of output of each request that was sent meanwhile, by the engine's name for it."""
    return {
        entry.request_id: int(entry.plain["request"]["max_new_tokens"])
        for entry in told.entries
        if entry.kind == "submit"
    }


def arrivals_of(told: Recording, lengths: Sequence[int]) -> list[int]:
    """The steps after which the requests with these most tokens arrived, counted from the first one; -1: it did not."""
    step, came = 0, dict[int, int]()
    for entry in told.entries:
        if entry.kind == "step":
            step += bool(entry.plain["slices"]) and bool(came)
        elif entry.kind == "submit":
            came[int(entry.plain["request"]["max_new_tokens"])] = step
    return [came.get(length, -1) for length in lengths]


def most_live(told: Recording) -> int:
    """The most requests that had arrived and were not over in one step, whether it computed all of them or not."""
    step, spans = 0, dict[str, list[int]]()
    for entry in told.entries:
        if entry.kind == "submit":
            spans[entry.request_id] = [step, -1]
        elif entry.kind == "step":
            for request, *_ in entry.plain["slices"]:
                if request in spans:
                    spans[request][1] = step
            step += 1
    return max(
        (sum(first <= begin <= last for first, last in spans.values()) for begin, _ in spans.values()), default=0
    )


def apart(told: Recording, count: int) -> str:
    """Why so many requests could not share a step; empty: they could."""
    seats, together = told.config.limits.max_num_seqs, most_live(told)
    if seats < count:
        return f"the server has {seats} seats"
    return "" if together >= count else f"at most {together} of {count} requests were there at one time"

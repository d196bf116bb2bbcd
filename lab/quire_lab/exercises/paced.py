"""A server of our own whose steps wait, so that each request arrives between two chosen steps.

Promises: a request that was sent is with the engine before the next call; the server runs freely once this is left.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from quire_bench.servers import BenchError
from quire_lab.facts.live import Live

_PATIENCE = 120.0
_POLL_SECONDS = 0.002

Reply = dict[str, Any]


class Paused:
    """The pause of a server that was started with `--set learn=true`."""

    def __init__(self, live: Live, pool: ThreadPoolExecutor) -> None:
        self._live, self._pool = live, pool
        self._calls: list[Future[Reply]] = []
        self._order("pause")

    def send(self, call: Callable[[], Reply]) -> None:
        """Send a request and wait until the engine has it. Raises BenchError."""
        self._calls.append(self._pool.submit(call))
        wanted = len(self._calls)
        self._wait(
            lambda: self._live.debug("requests")["num_live"] >= wanted or self._calls[-1].done(),
            f"{wanted} requests were not queued",
        )

    def step(self, count: int) -> None:
        """Let through as many steps. Raises BenchError."""
        self._order("pause", count)
        self._wait(lambda: self._order("pause") == 0, f"{count} steps were not computed")

    def go_on(self) -> None:
        """Let all steps through."""
        self._order("run")

    def replies(self) -> list[Reply]:
        """The replies to all requests, once all have ended. Raises BenchError."""
        self.go_on()
        return [call.result() for call in self._calls]

    def _wait(self, is_done: Callable[[], bool], otherwise: str) -> None:
        """Poll; the pause would end by itself a few seconds after the last order."""
        deadline = time.monotonic() + _PATIENCE
        while not is_done():
            if time.monotonic() > deadline:
                raise BenchError(f"{otherwise} in {_PATIENCE:g} s")
            time.sleep(_POLL_SECONDS)
            self._order("pause")

    def _order(self, mode: str, steps: int = 0) -> int:
        """The steps that are still let through."""
        reply = json.load(self._live.request("POST", "/admin/pace", {"mode": mode, "steps": steps}, admin=True))
        return int(reply["steps_left"])


@contextmanager
def paused(live: Live, most: int) -> Iterator[Paused]:
    """Pause an idle server for `most` requests. Raises BenchError where it has other work."""
    live.until_idle()
    with ThreadPoolExecutor(most) as pool:
        pause = Paused(live, pool)
        try:
            yield pause
        finally:
            pause.go_on()
    live.until_idle()

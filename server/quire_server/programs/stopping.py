"""Stops a program by SIGTERM or SIGINT: the first signal drains, the second one ends what still runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("quire")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Stop requests by signal: the first one drains the server, the second one ends its requests."""

    asked: asyncio.Future[None]
    insisted: asyncio.Future[None]

    def received(self, number: signal.Signals) -> None:
        """A signal to stop has come."""
        log.info("received %s", number.name)
        for degree in (self.asked, self.insisted):
            if not degree.done():
                degree.set_result(None)
                return


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Handle SIGTERM and SIGINT, the latter also where it was ignored: who names a server's process means it."""
    loop = asyncio.get_running_loop()
    stop = Stop(asked=loop.create_future(), insisted=loop.create_future())
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        loop.add_signal_handler(number, stop.received, number)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def first_of(*futures: asyncio.Future[Any], seconds: float | None = None) -> None:
    """Wait until one of the futures is done or `seconds` are over."""
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

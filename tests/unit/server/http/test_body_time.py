"""The time of a body: what a client lets pass counts, and not a pause of the server."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from quire_engine.own_pauses import OwnPauses
from quire_server.errors import RequestTimeout
from quire_server.http.body_limits import BodyBudget, BodyHold, BodyLimits
from quire_server.http.guard import Arrival, Exchange
from quire_server.http.turns import Turns

SECONDS = 0.02


async def _received(*waits: float) -> Message:
    """The message that comes after some waits of seconds on a clock of the test; each outlasts a look for it."""
    now, coming = 100.0, list(waits)

    async def receive() -> Message:
        nonlocal now
        if coming:
            now += coming.pop(0)
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"{}"}

    async def send(_: Message) -> None:
        pass

    exchange = Exchange(
        receive,
        send,
        "req-1",
        limit=BodyLimits(max_body_bytes=100, max_model_len=1).of("/v1/completions"),
        declared=2,
        hold=BodyHold(BodyBudget(1000)),
        body_seconds=SECONDS,
        arrival=Arrival(OwnPauses(0.001, clock=lambda: now), Turns(), lambda: True),
    )
    return await exchange.receive()


def test_a_body_that_could_not_be_read_in_a_pause_has_its_time_anew() -> None:
    assert asyncio.run(_received(25.0))["body"] == b"{}"


def test_a_body_that_is_late_is_refused() -> None:
    with pytest.raises(RequestTimeout):
        asyncio.run(_received(2 * SECONDS))
    with pytest.raises(RequestTimeout):
        asyncio.run(_received(25.0, 2 * SECONDS))

"""The main process's end of the link to one API server: what it is asked while another order takes long."""

from __future__ import annotations

import asyncio

import pytest

from quire_server.api_servers.frames import Done
from quire_server.api_servers.session import Session
from support.fakes import make_app

pytestmark = pytest.mark.anyio


async def test_counts_are_asked_for_while_its_streams_end() -> None:
    """Else a server that waits for long streams at its end takes its API servers for silent, and kills them."""
    session = Session(make_app())
    ending = asyncio.create_task(session.order("idle"))
    await asyncio.sleep(0)
    assert not session.is_counting
    counting = asyncio.create_task(session.order("count"))
    await asyncio.sleep(0)
    assert session.is_counting
    session.receive(Done(token=2, counts=None))
    await counting
    assert not session.is_counting
    assert not ending.done()
    session.close()
    await ending

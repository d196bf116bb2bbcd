"""Ends the work of a reply when its client has gone.

Promises: the work is cancelled, and its `finally` blocks have run, before `ClientGone` is raised.
Must not know: what the work is. (Servers cancel streams at a disconnect, but not plain handlers.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from fastapi import Request

from quire_server.errors import ClientGone

Result = TypeVar("Result")


async def unless_client_gone(request: Request, work: Coroutine[object, object, Result]) -> Result:
    """The result of `work`. Raises ClientGone, with the work cancelled, once the client has closed the connection.

    The request's body must have been read: what comes next from the client can only be its leaving.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        leaving.result()  # an error here is ours, not the client's
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""Ends the work on a reply when its client has disconnected.

Promises: the work is cancelled at its next await, and its `finally` blocks have run, before `ClientGone` is raised.
(Servers cancel streams at a disconnect, but not plain handlers.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from fastapi import Request
from starlette.types import Receive

from quire_server.errors import ClientGone

Result = TypeVar("Result")
_DOUBT_SECONDS = 0.02


async def unless_client_gone(request: Request, work: Coroutine[object, object, Result]) -> Result:
    """The result of `work`. Raises ClientGone, with the work cancelled, once the client has closed the connection.

    The request's body must have been read, so that the next message can only be a disconnect. The work runs in the
    caller's task, which is cancelled as by a timeout; so a request needs one more task and not two.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("there is no task to be cancelled")
    has_left = is_over = False
    cancelled_before = task.cancelling()

    def left(_: asyncio.Future[None]) -> None:
        nonlocal has_left
        if not is_over:  # this is called with a delay, after which the work may have ended
            has_left = True
            task.cancel()

    leaving = asyncio.ensure_future(until_disconnect(request.receive))
    leaving.add_done_callback(left)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() <= cancelled_before:
            leaving.result()  # raises an error of `receive`
            raise ClientGone from None
        raise
    finally:
        is_over = True
        leaving.cancel()


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection, or has received its reply."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def look_for_leaving(request: Request) -> None:
    """Await this under `unless_client_gone` before expensive work. Raises ClientGone.

    The event loop polls its sockets once. A client that has closed its side may still wait for the reply: a short pause
    shows whether it does.
    """
    await asyncio.sleep(0)
    client_side = request.scope.get("state", {}).get("client_side")
    if client_side is None or client_side() == "open":
        return
    await asyncio.sleep(_DOUBT_SECONDS)
    if client_side() == "gone":  # the event loop has not seen it yet
        raise ClientGone

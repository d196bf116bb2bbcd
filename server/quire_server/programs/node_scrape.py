"""A node's metrics for Prometheus: `GET /metrics` on a port of their own, where `--metrics-listen` asks for one.

Promises: nothing else is answered there, and a scrape waits for no engine. Must not know: requests.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire_engine.contract.errors import ConfigError
from quire_server.engine.nodes.addresses import Address, resolve
from quire_server.http.listener import CLOSING_SECONDS, Listening, serve
from quire_server.metrics.node_metrics import NodeMetrics
from quire_server.settings import Settings


@asynccontextmanager
async def scraped(
    address: Address, metrics: NodeMetrics, ratio: Callable[[], float], settings: Settings
) -> AsyncIterator[str]:
    """Answer scrapes at an address; the URL. Raises ConfigError for one that cannot be had.

    `ratio`: the progress of the engine's start, 0 to 1.
    """

    async def scrape(_: Request) -> Response:  # on the loop's thread, as what it shows
        return Response(metrics.render(ratio()), media_type=metrics.content_type)

    started: asyncio.Future[Listening] = asyncio.get_running_loop().create_future()
    app = Starlette(routes=[Route("/metrics", scrape)])
    sock = await _bound(address)
    serving = asyncio.create_task(serve(app, settings, sock=sock, on_started=started.set_result), name="node-metrics")
    try:
        waited: list[asyncio.Future[Any]] = [started, serving]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            serving.result()
        yield f"{started.result().address}/metrics"
        started.result().stop(False)
        await asyncio.wait([serving], timeout=CLOSING_SECONDS)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def _bound(address: Address) -> socket.socket:
    try:
        (found, *_) = await resolve(address)
        family = socket.AF_INET6 if ":" in found.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"--metrics-listen {address}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((found.host, found.port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"--metrics-listen {address}: {error.strerror or error}") from None
    return sock

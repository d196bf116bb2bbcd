"""A front's way to a node: the connection and its handshake, and a question whether the node serves.

Promises: a connection that is returned has proven itself; any other is ended, and the error says why.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from quire_engine.contract.errors import ConfigError, ProtocolError
from quire_engine.links.handshake import HELLO_BYTES, Refused, check_hello, hello
from quire_engine.links.link_security import LinkSecurity
from quire_server.engine.nodes.addresses import Address, resolve
from quire_server.engine.nodes.frames import FROM_FRONT, FROM_NODE, NodeState
from quire_server.engine.nodes.link import Link


async def connect(address: Address, security: LinkSecurity) -> Link:
    """A connection to a node. Raises Refused, ConfigError, OSError; it takes as long as the node lets it."""
    found = await resolve(address)
    security.check_reach(f"the node at {address}", (each.host for each in found))
    loop, context = asyncio.get_running_loop(), security.connecting
    link = Link(reads=FROM_NODE, sends=FROM_FRONT)
    name = None if context is None else address.host
    try:
        transport, _ = await loop.create_connection(
            lambda: link, address.host, address.port, ssl=context, server_hostname=name
        )
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            theirs = await link.exactly(HELLO_BYTES)
        except Refused as refusal:
            raise Refused(f"the handshake failed, {refusal}; certificates may differ") from None
        check_hello(theirs)
        link.write(hello())
    except BaseException:
        link.abort("the handshake failed")
        raise
    return link


def why_unconnected(error: Exception, seconds: float) -> str:
    """An error of `connect`, within a timeout, in a few words."""
    if isinstance(error, TimeoutError):
        return f"no answer within {seconds:g} s"
    if isinstance(error, OSError):  # ssl.SSLError is one
        return getattr(error, "reason", None) or error.strerror or str(error)
    return str(error)


async def trouble_of(address: Address, security: LinkSecurity, seconds: float) -> str:
    """Why the node at this address takes no requests; empty if it does."""
    told: asyncio.Future[NodeState] = asyncio.get_running_loop().create_future()

    def receive(frame: Any) -> None:
        if isinstance(frame, NodeState) and not told.done():
            told.set_result(frame)

    try:
        async with asyncio.timeout(seconds):
            link = await connect(address, security)
            try:
                link.begin(receive)
                either: list[asyncio.Future[Any]] = [told, link.lost]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                link.abort("it was only asked")
    except (Refused, ConfigError, ProtocolError, OSError) as error:
        return why_unconnected(error, seconds)
    if not told.done():
        return link.why_lost
    state = told.result()
    if state.plan is None and state.progress is not None:
        return f"it starts: {state.progress.phase}"
    return "it drains" if state.draining else "" if state.state == "ready" else f"its engine is {state.state}"

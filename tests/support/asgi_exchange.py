"""The server's side of one ASGI exchange, for replies that are called without a server.

Promises: a message that the client does not take yet is not counted as sent.
Must not know: the modules under test.
"""

from __future__ import annotations

import asyncio


class Exchange:
    """What was sent; `leaves` is set when the client goes, `takes` cleared while it does not read."""

    def __init__(self) -> None:
        self.sent: list[dict] = []
        self.leaves = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()

    async def receive(self) -> dict:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict) -> None:
        await self.takes.wait()
        self.sent.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

"""One message after another for all who listen, each at its own pace.

Promises: nothing is kept for a slow listener, who gets the latest message when it is ready for one; a listener
more costs no more than its own writes. Must not know: what the messages say, routes.
"""

from __future__ import annotations

import asyncio


class Feed:
    """The latest message, and a wait for the next one. Used on the event loop's thread."""

    def __init__(self) -> None:
        self.num_listeners = 0
        self._latest = b""
        self._news = asyncio.Event()

    def publish(self, message: bytes) -> None:
        """Wake all who wait, with this message."""
        self._latest = message
        self._news.set()
        self._news = asyncio.Event()

    async def next(self) -> bytes:
        """The message that is published next, or a later one."""
        await self._news.wait()
        return self._latest

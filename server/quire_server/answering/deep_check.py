"""A real request of one token, to find out whether the engine computes: for probes that trust nothing less.

There is at most one at a time, whoever asks, with a bounded wait; it needs no place in the queue.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from quire_engine.types import GenerationRequest, SamplingParams, StopParams
from quire_server.answering.generation import error_of
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.errors import NotReady

DEEP_SECONDS = 30.0  # that it may take: it waits its turn behind what was accepted before it
_FIRST_PRIORITY = -(2**31)


class DeepCheck:
    """Whoever asks while one is under way gets its result."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._running: asyncio.Task[float] | None = None

    async def seconds(self) -> float:
        """What the engine took for one token. Raises NotReady, EngineFailed."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(), name="deep-check")
        return await asyncio.shield(self._running)

    async def _run(self) -> float:
        started = time.monotonic()
        request = GenerationRequest(
            request_id=secrets.token_hex(12),
            prompt_token_ids=(0,),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=1),
            arrival_time=started,
            priority=_FIRST_PRIORITY,
        )
        stream = RequestStream(self._client)
        try:
            async with asyncio.timeout(DEEP_SECONDS):
                self._client.submit(request, stream, is_check=True)
                async for outputs in stream:
                    for output in outputs:
                        if output.finish == "error":
                            raise error_of(output)
        except TimeoutError:
            raise NotReady(f"One token was not computed within {DEEP_SECONDS:g} s.", code="check_failed") from None
        finally:
            stream.close()
        return time.monotonic() - started

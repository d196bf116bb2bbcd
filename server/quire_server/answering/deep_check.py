"""The deep health check: a real request of one token, which shows whether the engine computes.

At most one runs at a time, its wait is bounded, and it needs no place in the queue.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_server.answering.generation import error_of
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.errors import NotReady

DEEP_SECONDS = 30.0  # timeout, since it waits behind requests that were accepted before it
_FIRST_PRIORITY = -(2**31)


class DeepCheck:
    """Runs one check of an engine at a time; concurrent callers share its result."""

    def __init__(self) -> None:
        self._running: dict[EngineClient, asyncio.Task[float]] = {}

    async def seconds(self, client: EngineClient) -> float:
        """The seconds that the engine took for one token. Raises NotReady, EngineFailed."""
        running = self._running.get(client)
        if running is None or running.done():
            running = self._running[client] = asyncio.create_task(_run(client), name="deep-check")
        return await asyncio.shield(running)


async def _run(client: EngineClient) -> float:
    started = time.monotonic()
    request = GenerationRequest(
        request_id=secrets.token_hex(12),
        prompt_token_ids=(0,),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_new_tokens=1),
        arrival_time=started,
        priority=_FIRST_PRIORITY,
    )
    stream = RequestStream(client)
    try:
        async with asyncio.timeout(DEEP_SECONDS):
            client.submit(request, stream, is_check=True)
            async for outputs in stream:
                for output in outputs:
                    if output.finish == "error":
                        raise error_of(output)
    except TimeoutError:
        raise NotReady(f"One token was not computed within {DEEP_SECONDS:g} s.", code="check_failed") from None
    finally:
        stream.close()
    return time.monotonic() - started

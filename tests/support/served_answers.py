"""What a server answers, with a real engine process behind it: the other side of comparisons with the offline API.

Promises: the whole application, called without sockets; nothing is left running.
Must not know: torch, the offline API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from quire_server.app import create_app
from quire_server.engine.supervisor import Supervisor
from quire_server.settings import Settings
from quire_server.state import build_state
from support.fakes import connect


def served_answers(requests: Sequence[tuple[str, dict[str, Any]]], **settings: object) -> list[dict[str, Any]]:
    """The replies to (path, body), all asked for at once, of a server with these settings."""
    return asyncio.run(_answers(requests, Settings(**settings)))


async def _answers(requests: Sequence[tuple[str, dict[str, Any]]], settings: Settings) -> list[dict[str, Any]]:
    supervisor = Supervisor(settings.engine_config())
    state = await build_state(settings, supervisor, asyncio.create_task(supervisor.start()))
    try:
        async with connect(create_app(state), timeout=120, headers={"host": "localhost"}) as client:
            replies = await asyncio.gather(*(client.post(path, json=body) for path, body in requests))
    finally:
        await supervisor.stop()
        if state.prompts is not None:
            state.prompts.close()
    for reply in replies:
        assert reply.status_code == 200, reply.text
    return [reply.json() for reply in replies]

"""How far a start has come, and orders that an engine process carries out."""

from __future__ import annotations

import json

from quire_engine.process.transport import LoadProgress
from quire_server.engine.supervisor import EngineState
from support.supervising import request, run, supervised


def test_how_far_a_start_has_come() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, _):
            assert supervisor.load_ratio() == 1.0
            process = supervisor._process
            assert process is not None
            supervisor.state = EngineState.RESTARTING
            assert supervisor.load_ratio() == 0.0
            process.progress = LoadProgress(phase="reading weights", done=3, total=4)
            assert supervisor.load_ratio() == 0.75
            process.progress = LoadProgress(phase="compiling")
            assert supervisor.load_ratio() == 0.0
            supervisor.state = EngineState.READY

    run(body)


def test_an_order_is_carried_out_by_the_engine_process() -> None:
    async def body() -> None:
        async with supervised() as (supervisor, client):
            supervisor.submit(request("r", tokens=30))
            await client.until(lambda: bool(client.tokens))
            answer = json.loads(await supervisor.control("reset_prefix_cache"))
            assert answer == {"device_blocks": 0, "host_blocks": 0}
            await client.until(lambda: ("r", 0) in client.ends)

    run(body)

"""`kill -9` of an engine at every phase of a model's life: everything is answered, with the tokens of no kill."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from e2e.served import Served
from replicas.streams import Said, asked, client, stream
from several.server import NAMES, order, reached, row, untruths

STREAMS = (0, 1, 4)  # of every model: greedy, drawn, and constrained
MOST_TRIES = 5
Expected = dict[tuple[str, int], Said]


async def said_by(
    server: Served, name: str, numbers: tuple[int, ...] = STREAMS, on_chunk: Callable[[], None] = lambda: None
) -> list[Said]:
    async with client(server.url) as http:
        return list(await asyncio.gather(*(stream(http, number, on_chunk, name) for number in numbers)))


async def expected_of(server: Served, numbers: tuple[int, ...] = STREAMS) -> Expected:
    """What each model says undisturbed."""
    found: Expected = {}
    for name in NAMES:
        found |= {
            (name, number): said for number, said in zip(numbers, await said_by(server, name, numbers), strict=True)
        }
    return found


@dataclass(slots=True)
class Scene:
    """A server in which alpha is about to be disturbed."""

    server: Served
    chunks: int = 0
    kills: int = 0

    def kill(self, pid: int | None) -> None:
        """End an engine, if it has not ended by itself."""
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.kills += 1

    def chunk(self) -> None:
        self.chunks += 1

    async def ordered(self, what: str, name: str = "alpha", **more: Any) -> None:
        await asyncio.to_thread(order, self.server, what, name, **more)

    async def in_state(self, state: str, name: str = "alpha") -> int | None:
        pid: int | None = (await reached(self.server, name, lambda told: told["state"] == state))["pid"]
        return pid

    async def at_load(self, share: float) -> None:
        """Kill the engine when so much of the time that a load takes has passed."""
        told = await reached(self.server, "alpha", lambda told: told["state"] == "loading" and told["pid"] is not None)
        await asyncio.sleep(share * told["seconds_until_loaded"])
        self.kill((await asyncio.to_thread(row, self.server, "alpha"))["pid"])


async def _first_load(scene: Scene) -> None:
    await scene.at_load(0.0)


async def _half_a_load(scene: Scene) -> None:
    await scene.at_load(0.5)


async def _end_of_a_load(scene: Scene) -> None:
    await scene.at_load(0.9)


async def _loaded(scene: Scene) -> None:
    scene.kill(await scene.in_state("loaded"))


async def _streaming(scene: Scene) -> None:
    await scene.in_state("loaded")
    while scene.chunks < 20:  # noqa: ASYNC110 - it is looked at, not told
        await asyncio.sleep(0.002)
    scene.kill((await asyncio.to_thread(row, scene.server, "alpha"))["pid"])


async def _restarting(scene: Scene) -> None:
    scene.kill(await scene.in_state("loaded"))
    told = await reached(
        scene.server, "alpha", lambda told: told["state"] == "loaded" or (told["state"] == "restarting" and told["pid"])
    )
    scene.kill(told["pid"])


async def _unloading(scene: Scene) -> None:
    pid = await scene.in_state("loaded")
    ordering = asyncio.create_task(scene.ordered("unload"))
    await reached(scene.server, "alpha", lambda told: told["state"] in {"unloading", "unloaded"})
    scene.kill(pid)
    await ordering
    await scene.ordered("load")


async def _going_to_sleep(scene: Scene) -> None:
    pid = await scene.in_state("loaded")
    ordering = asyncio.create_task(scene.ordered("sleep"))
    scene.kill(pid)
    await ordering
    await scene.ordered("load")


async def _waking(scene: Scene) -> None:
    await scene.in_state("loaded")
    await scene.ordered("sleep")
    loading = asyncio.create_task(scene.ordered("load"))
    await scene.at_load(0.0)
    await loading


async def _end_of_a_wake(scene: Scene) -> None:
    await scene.in_state("loaded")
    await scene.ordered("sleep")
    loading = asyncio.create_task(scene.ordered("load"))
    await scene.at_load(0.8)
    await loading


async def _making_way(scene: Scene) -> None:
    """Killed while others, which are asked at the same time, take its memory."""
    pid = await scene.in_state("loaded")
    others = asyncio.create_task(_ask_others(scene))
    scene.kill(pid)
    await others


async def _swapping_back(scene: Scene) -> None:
    """Killed while it is loaded again after others had its memory."""
    await scene.in_state("loaded")
    await scene.ordered("unload")
    await _ask_others(scene)
    loading = asyncio.create_task(scene.ordered("load"))
    await scene.at_load(0.3)
    await loading


async def _ask_others(scene: Scene) -> None:
    await asyncio.gather(*(said_by(scene.server, name) for name in NAMES[1:]))


PHASES: dict[str, Callable[[Scene], Awaitable[None]]] = {
    "a load has begun": _first_load,
    "half of a load": _half_a_load,
    "the end of a load": _end_of_a_load,
    "loaded, before a token": _loaded,
    "tokens are streamed": _streaming,
    "it is restarted after a kill": _restarting,
    "it is unloaded by order": _unloading,
    "it goes to sleep by order": _going_to_sleep,
    "a wake has begun": _waking,
    "the end of a wake": _end_of_a_wake,
    "it makes way for others": _making_way,
    "it is swapped back": _swapping_back,
}


async def run_phase(server: Served, phase: str, expected: Expected) -> list[str]:
    """What went wrong in a phase; nothing: all was answered as without a kill, and what is told is so.

    An engine that has ended before it could be killed proves nothing: then it is tried again.
    """
    for _ in range(MOST_TRIES):
        scene = Scene(server)
        wrong = await _try_phase(scene, phase, expected)
        if wrong or scene.kills:
            return wrong
    return [f"no engine could be killed in {MOST_TRIES} tries"]


async def _try_phase(scene: Scene, phase: str, expected: Expected) -> list[str]:
    server = scene.server
    for name in NAMES:
        await asyncio.to_thread(order, server, "unload", name)
    asking = asyncio.create_task(said_by(server, "alpha", on_chunk=scene.chunk))
    await PHASES[phase](scene)
    wrong = await asyncio.to_thread(untruths, server)
    said = await asyncio.wait_for(asking, 300)
    wrong += _differences(expected, "alpha", said)
    for name in NAMES:
        wrong += _differences(expected, name, await asyncio.wait_for(said_by(server, name), 300))
    return wrong + await asyncio.to_thread(untruths, server)


def _differences(expected: Expected, name: str, said: list[Said]) -> list[str]:
    return [
        f"stream {number} of {name} ({asked(number)[0]}): {each.errors or 'other tokens'}"
        for number, each in zip(STREAMS, said, strict=True)
        if each != expected[name, number] or not each.is_done
    ]

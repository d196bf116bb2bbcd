"""Engines that are killed under streams: the next one takes over what the pool holds, and no stream differs.

One that fails by itself leaves nothing to be believed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.demo import demo_model_path
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import EngineState, Supervisor
from support.covering import few

PROMPT, TOKENS, BLOCK = 100, 150, 16
NAMES = ("r0", "r1", "r2", "r3")


class Streams:
    """What four streams got, and how many prompt tokens the engines computed meanwhile."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.tokens: dict[str, list[int]] = {name: [] for name in NAMES}
        self.ended: set[str] = set()
        self.prefilled = 0
        self._supervisor = supervisor
        self._changed = asyncio.Event()
        supervisor.on_step = self._take

    def submit(self) -> None:
        for number, name in enumerate(NAMES):
            prompt = tuple((number * 977 + at * 131) % 2000 + 10 for at in range(PROMPT))
            sampling = SamplingParams(temperature=1.0 if number % 2 else 0.0, seed=number)
            stop = StopParams(max_new_tokens=TOKENS)
            self._supervisor.submit(
                GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, stop=stop)
            )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _take(self, step: StepOutput) -> None:
        self.prefilled += step.stats.prefill_tokens
        for output in step.outputs:
            self.tokens[output.request_id] += output.token_ids
            if output.finish is not None:
                assert output.finish == "length"
                self.ended.add(output.request_id)
        self._changed.set()


TWICE = (signal.SIGKILL, signal.SIGKILL, signal.SIGABRT)


# Streams with guessed tokens over kills: tests/e2e/test_speculation.py.
@pytest.mark.parametrize(
    ("speculation", "kills"),
    few([("off", TWICE[1:]), ("off", TWICE), ("suffix", TWICE)], ("off", TWICE[1:])),
)
def test_what_a_killed_engine_had_computed_is_not_computed_again(
    speculation: str, kills: tuple[signal.Signals, ...]
) -> None:
    async def body() -> None:
        config = EngineConfig(model=str(demo_model_path()), kv_memory=16 << 20, speculation=speculation)
        supervisor = Supervisor(config, RestartPolicy(first_backoff_seconds=0.01))
        plan = await supervisor.start()
        try:
            assert plan.scheduler.limits.block_size == BLOCK
            assert plan.pool.blocks_taken_over == 0
            undisturbed = await _play(supervisor, _nothing)
            for number in kills:
                supervisor_restarts = supervisor.restarts

                async def end(streams: Streams, number: int = number) -> None:
                    await streams.until(lambda: all(len(known) > 40 for known in streams.tokens.values()))
                    streams.prefilled = 0
                    assert supervisor.pid is not None
                    os.kill(supervisor.pid, number)

                streams = await _play(supervisor, end)
                assert streams.tokens == undisturbed.tokens
                assert supervisor.restarts == supervisor_restarts + 1
                assert supervisor.plan is not None
                if number == signal.SIGKILL:
                    assert supervisor.plan.pool.blocks_taken_over >= len(NAMES) * ((PROMPT + 40) // BLOCK)
                    assert streams.prefilled <= len(NAMES) * BLOCK
                else:
                    assert supervisor.plan.pool.blocks_taken_over == 0
                    assert streams.prefilled >= len(NAMES) * PROMPT
                assert supervisor.state is EngineState.READY
        finally:
            await supervisor.stop()

    asyncio.run(body())


async def _nothing(streams: Streams) -> None:
    pass


async def _play(supervisor: Supervisor, disturb: Callable[[Streams], Awaitable[None]]) -> Streams:
    streams = Streams(supervisor)
    await supervisor.control("reset_prefix_cache")
    streams.submit()
    await disturb(streams)
    await streams.until(lambda: len(streams.ended) == len(NAMES))
    return streams

"""The client in front of the engine: what a step does to the streams, whatever else goes wrong."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from quire_engine.types import EngineStats, GenerationRequest, SamplingParams, StepOutput, StopParams, TokenOutput
from quire_server.engine.admission import QueueLimits
from quire_server.engine.budgets import LONGEST_SECONDS
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.errors import QueueFull
from support.fakes import make_plan


def test_a_fault_in_counting_costs_no_tokens() -> None:
    async def body() -> None:
        metrics = Mock()
        metrics.observe_step.side_effect = RuntimeError("no such counter")
        client = EngineClient(Mock(), plan=make_plan(), limits=QueueLimits(max_sequences=1), metrics=metrics)
        stream = RequestStream(client)
        client.submit(
            GenerationRequest(
                request_id="r",
                prompt_token_ids=(1,),
                sampling=SamplingParams(),
                stop=StopParams(max_new_tokens=8),
            ),
            stream,
        )
        last = TokenOutput(request_id="r", token_ids=(5,), finish="length")
        with pytest.raises(RuntimeError):
            client.on_step(StepOutput(step_id=1, outputs=(last,), stats=EngineStats()))
        assert client.in_flight == 0
        assert [outputs async for outputs in stream] == [[last]]

    asyncio.run(body())


def test_who_is_refused_while_the_engine_is_absent_comes_again_when_it_is_there() -> None:
    async def body() -> None:
        def refused_for(absent_seconds: float) -> float:
            client = EngineClient(Mock(), plan=make_plan(), limits=QueueLimits(max_sequences=1), metrics=Mock())
            client.seconds_until_engine = lambda: absent_seconds
            for number in range(2):
                request = GenerationRequest(
                    request_id=f"r{number}",
                    prompt_token_ids=(1,),
                    sampling=SamplingParams(),
                    stop=StopParams(max_new_tokens=8),
                )
                if number == 0:
                    client.submit(request, RequestStream(client))
                else:
                    with pytest.raises(QueueFull) as refusal:
                        client.submit(request, RequestStream(client))
            return float(refusal.value.headers["retry-after-ms"]) / 1000

        there = refused_for(0.0)
        assert refused_for(7.0) == pytest.approx(there + 7.0, abs=0.1)
        assert refused_for(1000.0) == pytest.approx(LONGEST_SECONDS, abs=0.1)

    asyncio.run(body())

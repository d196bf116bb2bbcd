"""The client in front of the engine: what a step does to the streams, whatever else goes wrong."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from quire_engine.types import EngineStats, GenerationRequest, SamplingParams, StepOutput, StopParams, TokenOutput
from quire_server.engine.admission import QueueLimits
from quire_server.engine.engine_client import EngineClient, RequestStream
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

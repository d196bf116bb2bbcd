"""The client in front of the engine: what a step does to the streams, whatever else goes wrong."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from quire_engine.contract.types import (
    EngineStats,
    GenerationRequest,
    RequestTiming,
    SamplingParams,
    StepOutput,
    StopParams,
    TokenOutput,
)
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


def test_a_prompt_counts_once_in_the_step_of_its_first_token_however_much_was_cached() -> None:
    async def body() -> None:
        client = EngineClient(Mock(), plan=make_plan(), limits=QueueLimits(max_sequences=4), metrics=Mock())
        for name in ("a", "b"):
            request = GenerationRequest(
                request_id=name,
                prompt_token_ids=(1, 2, 3, 4, 5),
                sampling=SamplingParams(),
                stop=StopParams(max_new_tokens=8),
                n=2,
            )
            client.submit(request, RequestStream(client))
        timing = RequestTiming(queue_seconds=0.0, kv_wait_seconds=0.0, prefill_seconds=0.1, num_preemptions=0)
        first = [TokenOutput(request_id="a", choice=i, token_ids=(7,), timing=timing) for i in range(2)]
        more = [TokenOutput(request_id="a", choice=i, token_ids=(7,)) for i in range(2)]
        last = [TokenOutput(request_id="a", choice=i, token_ids=(7,), timing=timing, finish="length") for i in range(2)]
        other = [TokenOutput(request_id="b", token_ids=(7,), timing=timing, num_cached_tokens=4)]
        for outputs in (first, more, last + other):
            client.on_step(StepOutput(step_id=1, outputs=tuple(outputs), stats=EngineStats()))
        counts = [call.args[1:] for call in client._metrics.observe_step.call_args_list]  # type: ignore[attr-defined]
        assert counts == [(2, 5), (2, 0), (3, 5)]

    asyncio.run(body())

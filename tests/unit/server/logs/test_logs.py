"""Log lines: one per record, machine-readable on request, and the throughput line."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import pytest

from quire_engine.contract.types import EngineStats
from quire_server.logs import JsonFormatter, TextFormatter, log_throughput, throughput_line
from quire_server.metrics.metrics import Metrics

HOSTILE = "line\nforged: INFO quire: \x1b[31mred\x00\u2028end"


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("quire.test", logging.INFO, __file__, 1, message, args, None)
    for name, value in extra.items():
        setattr(made, name, value)
    return made


def failed() -> logging.LogRecord:
    try:
        raise ValueError("inside")
    except ValueError:
        made = record("it broke")
        made.exc_info = sys.exc_info()
        return made


def test_text_lines():
    line = TextFormatter().format(record("served %d", 3, request_id="req-1"))
    assert line.endswith(" INFO quire.test: served 3 [req-1]")
    assert TextFormatter().format(record("plain")).endswith("quire.test: plain")


def test_a_client_cannot_forge_a_line_or_colour_a_terminal():
    line = TextFormatter().format(record("%s", HOSTILE))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert r"line\x0aforged" in line


def test_json_lines():
    values = json.loads(JsonFormatter().format(record("%s", HOSTILE, request_id="req-1", status=200, client="1.2.3.4")))
    assert values["message"] == HOSTILE
    assert (values["request_id"], values["status"], values["client"]) == ("req-1", 200, "1.2.3.4")
    assert values["level"] == "info"
    assert values["time"].endswith("Z")
    assert "\n" not in JsonFormatter().format(record(HOSTILE))
    assert "request_id" not in json.loads(JsonFormatter().format(record("x")))


def test_exceptions_are_shown():
    assert "ValueError: inside" in TextFormatter().format(failed())
    assert "ValueError: inside" in json.loads(JsonFormatter().format(failed()))["exception"]


def step(metrics: Metrics, **changes: object) -> None:
    values: dict[str, object] = {"blocks_total": 10, "step_seconds": 0.1, "host_seconds": 0.01}
    metrics.observe_step(EngineStats(**(values | changes)))


def test_the_throughput_line():
    metrics = Metrics("tiny")
    before = metrics.throughput()
    step(
        metrics,
        running=2,
        waiting={"kv": 1, "slots": 3},
        blocks_used=5,
        prefill_tokens=100,
        total_prefix_query_tokens=80,
        total_prefix_hit_tokens=20,
    )
    metrics.start(prompt_tokens=1, max_tokens=None, n=1).tokens(0, 30, 0.0)
    assert throughput_line(before, metrics.throughput(), 10.0) == (
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 3.0 tokens/s, Running: 2 reqs,"
        " Waiting: 4 reqs, KV cache usage: 50.0%, Prefix cache hit rate: 25.0%"
    )


def test_the_line_comes_while_active_and_once_after(caplog: pytest.LogCaptureFixture):
    async def scenario() -> None:
        metrics = Metrics("tiny")
        task = asyncio.create_task(log_throughput(metrics, 0.05))
        await asyncio.sleep(0.12)
        assert caplog.records == []
        step(metrics, running=1)
        await asyncio.sleep(0.12)
        assert len(caplog.records) >= 1
        step(metrics)
        await asyncio.sleep(0.12)
        seen = len(caplog.records)
        await asyncio.sleep(0.12)
        assert len(caplog.records) == seen
        assert "Running: 0 reqs" in caplog.records[-1].getMessage()
        task.cancel()

    caplog.set_level(logging.INFO, logger="quire.stats")
    asyncio.run(scenario())

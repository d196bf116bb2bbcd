"""Metrics of requests at a small collector: names, units, attributes and counts by the conventions, never text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.fake_engine import FakeEngine
from support.fakes import connect, make_app, make_state
from support.otlp import Collector, collector, plain

pytestmark = pytest.mark.anyio


@pytest.fixture
def collecting() -> Iterator[Collector]:
    with collector() as made:
        yield made


def points(collector: Collector) -> tuple[dict[str, object], dict[str, tuple[str, list[object]]]]:
    """The resource's attributes; of each metric of the last export its unit and points."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    assert collector.headers[-1]["path"] == "/v1/metrics"
    request = ExportMetricsServiceRequest()
    request.ParseFromString(collector.bodies[-1])
    (each,) = request.resource_metrics
    metrics = [metric for scope in each.scope_metrics for metric in scope.metrics]
    return plain(each.resource.attributes), {
        metric.name: (metric.unit, list(metric.histogram.data_points)) for metric in metrics
    }


async def send(endpoint: str) -> None:
    """Completions of 4 and 6 tokens, a chat, and what has no histogram."""
    state = make_state(engine=FakeEngine(step_seconds=0.002), otlp_metrics_endpoint=endpoint)
    app = make_app(state)
    async with app.router.lifespan_context(app), connect(app) as client:
        for tokens in (4, 6):
            body = {"prompt": "secret prompt", "max_tokens": tokens, "stream": tokens == 6}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        chat = {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": -2})).status_code == 400
        assert (await client.get("/health")).status_code == 200


async def test_four_histograms_of_what_was_computed(collecting: Collector) -> None:
    await send(collecting.url)
    resource, found = points(collecting)
    assert resource["service.name"] == "quire"
    assert b"secret" not in b"".join(collecting.bodies)
    counts, sums = {}, {}
    for name, (unit, each) in found.items():
        assert unit == ("{token}" if name == "gen_ai.client.token.usage" else "s")
        for point in each:
            told = plain(point.attributes)  # type: ignore[attr-defined]
            assert told["gen_ai.provider.name"] == "quire"
            assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "fake"
            key = (name, told["gen_ai.operation.name"], told.get("gen_ai.token.type"))
            counts[key], sums[key] = point.count, point.sum  # type: ignore[attr-defined]
            assert len(point.explicit_bounds) in (13, 14, 16)  # type: ignore[attr-defined]
    assert counts == {
        ("gen_ai.server.request.duration", "text_completion", None): 2,
        ("gen_ai.server.request.duration", "chat", None): 1,
        ("gen_ai.client.token.usage", "text_completion", "input"): 2,
        ("gen_ai.client.token.usage", "text_completion", "output"): 2,
        ("gen_ai.client.token.usage", "chat", "input"): 1,
        ("gen_ai.client.token.usage", "chat", "output"): 1,
        ("gen_ai.server.time_to_first_token", "text_completion", None): 2,
        ("gen_ai.server.time_to_first_token", "chat", None): 1,
        ("gen_ai.server.time_per_output_token", "text_completion", None): 2,
    }
    assert sums["gen_ai.client.token.usage", "text_completion", "output"] == 10
    assert sums["gen_ai.client.token.usage", "text_completion", "input"] == 2 * len("secret prompt")
    assert 0.002 <= sums["gen_ai.server.time_per_output_token", "text_completion", None] < 60


@pytest.mark.matrix  # as one of traces: test_tracing.py
async def test_a_collector_that_is_gone_harms_nobody() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    await send("http://127.0.0.1:9")

"""Traces against a small collector: what a span says, whose child it is, and that a broken collector harms nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from architecture.source import reachable
from quire_engine.contract.errors import ConfigError
from quire_server.logs import output, tracing
from quire_server.logs.output import check_collector, collector_url
from support.covering import few
from support.fake_engine import FakeEngine
from support.fakes import connect, make_app, make_state
from support.otlp import Collector, collector, plain

pytestmark = pytest.mark.anyio

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with collector() as made:
        yield made


async def send(endpoint: str, **headers: str) -> None:
    """One completion of 4 tokens through an app that is shut down as a server is."""
    state = make_state(engine=FakeEngine(step_seconds=0.002, num_cached_tokens=2), otlp_traces_endpoint=endpoint)
    app = make_app(state)
    async with app.router.lifespan_context(app), connect(app) as client:
        body = {"prompt": "secret prompt", "max_tokens": 4}
        reply = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine", **headers})
        assert reply.status_code == 200
        assert (await client.get("/health")).status_code == 200
        await client.get("/nothing")


async def test_a_request_is_a_span_with_its_phases_below(collecting: Collector) -> None:
    await send(collecting.url)
    resource, spans = collecting.spans()
    assert resource["service.name"] == "quire"
    assert collecting.headers[0]["path"] == "/v1/traces"
    by_name = {span.name: span for span in spans}  # type: ignore[attr-defined]
    assert set(by_name) == {"text_completion fake", "queue", "prefill", "decode", "GET unknown"}
    span = by_name["text_completion fake"]
    told = plain(span.attributes)  # type: ignore[attr-defined]
    assert (
        told.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": "fake",
            "gen_ai.response.model": "fake",
            "gen_ai.request.max_tokens": 4,
            "gen_ai.usage.input_tokens": len("secret prompt"),
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.usage.cache_read.input_tokens": 2,
            "gen_ai.request.id": "mine",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
        }.items()
    )
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert span.kind == 2  # type: ignore[attr-defined]  # a server's
    assert not span.parent_span_id  # type: ignore[attr-defined]
    assert "secret" not in str(spans)
    begins = span.start_time_unix_nano  # type: ignore[attr-defined]
    assert abs(begins / 1e9 - time.time()) < 60
    previous = begins
    for name in ("queue", "prefill", "decode"):
        phase = by_name[name]
        assert phase.parent_span_id == span.span_id  # type: ignore[attr-defined]
        assert previous <= phase.start_time_unix_nano + 1_000_000  # type: ignore[attr-defined]
        assert phase.start_time_unix_nano <= phase.end_time_unix_nano <= span.end_time_unix_nano + 5_000_000  # type: ignore[attr-defined]
        previous = phase.start_time_unix_nano  # type: ignore[attr-defined]


async def test_the_callers_trace_goes_on(collecting: Collector) -> None:
    await send(collecting.url, traceparent=f"00-{TRACE}-{CALLER}-01")
    _, spans = collecting.spans()
    (span,) = [each for each in spans if each.name == "text_completion fake"]  # type: ignore[attr-defined]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)  # type: ignore[attr-defined]


@pytest.mark.parametrize("parent", few(["nonsense", f"00-{'0' * 32}-{CALLER}-01", "00-" + "x" * 5000], "nonsense"))
async def test_a_parent_that_is_none_begins_a_trace(collecting: Collector, parent: str) -> None:
    await send(collecting.url, traceparent=parent)
    _, spans = collecting.spans()
    (span,) = [each for each in spans if each.name == "text_completion fake"]  # type: ignore[attr-defined]
    assert not span.parent_span_id  # type: ignore[attr-defined]


async def test_variables_of_the_sdk_hold(collecting: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chatty")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=1234")
    await send(collecting.url + "/v1/traces")
    resource, spans = collecting.spans()
    assert resource["service.name"] == "chatty"
    assert spans
    assert collecting.headers[0]["x-key"] == "1234"


async def test_a_collector_that_is_gone_broken_or_slow_harms_nobody(
    collecting: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(tracing.Tracing.close, "__defaults__", (0.2,))
    slow, broken = Collector(pause=60.0), Collector(status=500)
    for endpoint in ("http://127.0.0.1:9", slow.url, broken.url):
        started = time.monotonic()
        await send(endpoint)
        assert time.monotonic() - started < 30
    for thread in threading.enumerate():
        if thread.name == "traces":
            thread.join(300)
    for each in (slow, broken):
        each.server.shutdown()
        each.server.server_close()


async def test_the_end_has_a_time_limit(collecting: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    made, ended = tracing.Tracing(collecting.url, model="fake"), threading.Event()
    real = made._provider.shutdown
    monkeypatch.setattr(made._provider, "shutdown", lambda: ended.wait(120))
    started = time.monotonic()
    made.close(0.1)
    assert time.monotonic() - started < 60
    ended.set()
    real()


def test_what_cannot_be_a_collector() -> None:
    for signal in ("traces", "metrics"):
        check_collector(signal, None)
        for endpoint in ("localhost:4317", "grpc://localhost:4317", ""):
            with pytest.raises(ConfigError, match=rf"name a URL such as http://localhost:4318/v1/{signal}"):
                check_collector(signal, endpoint)
        assert collector_url(signal, "http://c:4318/") == f"http://c:4318/v1/{signal}"
        assert collector_url(signal, "http://c:4318/other") == "http://c:4318/other"


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_PARTS", dict.fromkeys(("traces", "metrics"), ("no_such_package.trace",)))
    for signal in ("traces", "metrics"):
        with pytest.raises(ConfigError, match=rf"--otlp-{signal}-endpoint needs .*pip install 'quire\[otel\]'"):
            check_collector(signal, "http://localhost:4318")


@pytest.mark.matrix  # starts a Python of its own
def test_nothing_of_it_is_loaded_unless_it_is_wanted() -> None:
    for module in ("quire_server.app", "quire_server.programs.launch"):
        assert "opentelemetry" not in {name.split(".")[0] for name in reachable(module)}
    assert "starlette" not in {name.split(".")[0] for name in reachable("quire_server.logs.output")}

"""The line of each request: one for each, with its times and counts, JSON whatever clients send, never text or keys."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

import httpx
import pytest

from quire_server.logs import JsonFormatter, TextFormatter
from quire_server.metrics.request_record import CURRENT
from support.fake_engine import FakeEngine
from support.fakes import connect, listening, make_app, make_state

pytestmark = pytest.mark.anyio

SECRET = "prompt-nobody-may-log"
HOSTILE = "a\nb\r\x1b[31m\x00\u202egnp\u2066\u2028\U0001f600\ud800".encode("utf-8", "surrogatepass")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, object]]]:
    """The requests' lines so far, as JSON; whatever else was logged must be one line of JSON too."""
    caplog.set_level(logging.INFO, logger="quire")

    def read() -> list[dict[str, object]]:
        for record in caplog.records:
            for formatter in (JsonFormatter(), TextFormatter()):
                assert len(formatter.format(record).splitlines()) == 1 or record.exc_info
        assert SECRET not in caplog.text
        found = [json.loads(JsonFormatter().format(each)) for each in caplog.records]
        return [each for each in found if each["logger"] == "quire.access"]

    return read


def completion(**fields: object) -> dict[str, object]:
    return {"prompt": SECRET, "max_tokens": 4, **fields}


async def test_what_a_line_says(lines: Callable[[], list[dict[str, object]]]) -> None:
    app = make_app(engine=FakeEngine(num_cached_tokens=3), api_key=("alice=0123456789",))
    headers = {"x-request-id": "mine", "authorization": "Bearer 0123456789"}
    async with connect(app, headers=headers) as client:
        (await client.post("/v1/completions?key=0123456789", json=completion())).raise_for_status()
    assert CURRENT.get() is None
    (line,) = lines()
    assert line["request_id"] == "mine"
    assert (line["method"], line["path"], line["route"], line["status"]) == (
        *("POST", "/v1/completions", "/v1/completions"),
        200,
    )
    assert (line["client"], line["key_name"], line["model"]) == ("127.0.0.1", "alice", "fake")
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (len(SECRET), 3, 4)
    assert (line["finish_reason"], line["queue_seconds"]) == ("length", 0.001)
    for name in ("ttft_seconds", "tpot_seconds", "e2e_seconds", "seconds"):
        assert 0 <= line[name] < 60, name  # type: ignore[operator]
    assert line["ttft_seconds"] <= line["e2e_seconds"] <= line["seconds"]  # type: ignore[operator]
    assert "0123456789" not in json.dumps(line)
    assert f"{len(SECRET)} + 4 tokens, 3 cached, length, queue 1 ms" in str(line["message"])


async def test_streams_choices_and_several_prompts_have_one_line_each(
    lines: Callable[[], list[dict[str, object]]],
) -> None:
    async with connect(make_app()) as client:
        await client.post("/v1/completions", json=completion(stream=True))
        await client.post("/v1/completions", json=completion(n=3, temperature=1, seed=1))
        await client.post("/v1/completions", json=completion(prompt=["one", "three"]))
        await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        )
        await client.post("/v1/embeddings", json={"input": ["one", "two", "three"]})
        await client.post("/v1/messages", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 4})
    found = lines()
    assert [line["output_tokens"] for line in found] == [4, 12, 8, 4, 0, 4]
    assert [line["prompt_tokens"] for line in found][:3] == [len(SECRET), len(SECRET), len("onethree")]
    assert [line["status"] for line in found] == [200] * 6
    assert found[4]["prompt_tokens"] == len("onetwothree")
    assert found[4]["ttft_seconds"] is None


async def test_refused_requests_and_probes(lines: Callable[[], list[dict[str, object]]]) -> None:
    async with connect(make_app()) as client:
        for path in ("/health", "/metrics", "/", "/version"):
            await client.get(path)
        await client.post("/v1/completions", json=completion(temperature="hot"))
        await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
        await client.get("/nothing")
        await client.request("BREW", "/v1/completions")
    found = lines()
    assert [line["status"] for line in found] == [400, 400, 404, 405]
    assert not [line for line in found if "prompt_tokens" in line]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_has_one_line_that_says_so(
    lines: Callable[[], list[dict[str, object]]], stream: bool
) -> None:
    engine = FakeEngine(step_seconds=0.01)
    app = make_app(make_state(engine=engine))
    async with listening(app) as server:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            asking = asyncio.create_task(
                client.post("/v1/completions", json=completion(max_tokens=400, ignore_eos=True, stream=stream))
            )
            while not engine.live:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(300):
            while not lines():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    (line,) = lines()
    assert line["finish_reason"] == "abort"


async def test_an_engine_that_fails(lines: Callable[[], list[dict[str, object]]]) -> None:
    async with connect(make_app(make_state(engine=FakeEngine(fail_after=2)))) as client:
        await client.post("/v1/completions", json=completion())
    (line,) = lines()
    assert (line["status"], line["finish_reason"], line["output_tokens"]) == (500, "error", 2)


Send = Callable[[httpx.AsyncClient], Awaitable[object]]
SENT: dict[str, Send] = {
    "text": lambda client: client.post("/v1/completions", json=completion(prompt=HOSTILE.decode("utf-8", "replace"))),
    "bytes": lambda client: client.post("/v1/completions", content=HOSTILE),
    "fields": lambda client: client.post("/v1/completions", json=completion(user="u" * 10_000, model="\x1b[31m\u202e")),
    "model": lambda client: client.post("/v1/completions", json=completion(model="m" * 10_000)),
    "path": lambda client: client.get("/%0A%1b%5b31m%e2%80%ae" + "p" * 10_000),
    "id": lambda client: client.get("/v1/models", headers=[(b"x-request-id", b"i" * 10_000)]),
    "id of bytes": lambda client: client.get("/v1/models", headers=[(b"x-request-id", b"\xff\xfe\x80")]),
    "stored": lambda client: client.get("/v1/responses/" + "r" * 10_000),
    "trace": lambda client: client.get(
        "/v1/models", headers=[(b"traceparent", HOSTILE.replace(b"\n", b"").replace(b"\r", b"").replace(b"\0", b""))]
    ),
}


@pytest.mark.parametrize("name", SENT)
async def test_whatever_is_sent_a_line_is_one_of_json(name: str, lines: Callable[[], list[dict[str, object]]]) -> None:
    async with connect(make_app()) as client:
        await SENT[name](client)
    (line,) = lines()
    assert len(json.dumps(line)) < 2_000


async def test_lines_of_requests_at_once_do_not_mix(lines: Callable[[], list[dict[str, object]]]) -> None:
    app = make_app(make_state(engine=FakeEngine(step_seconds=0.001)))
    async with connect(app) as client:
        await asyncio.gather(
            *(
                client.post(
                    "/v1/completions",
                    json=completion(max_tokens=count, stream=bool(count % 2)),
                    headers={"x-request-id": f"r{count}"},
                )
                for count in range(1, 30)
            )
        )
    assert {line["request_id"]: line["output_tokens"] for line in lines()} == {
        f"r{count}": count for count in range(1, 30)
    }

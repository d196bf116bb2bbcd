"""CORS: a page of an allowed origin can read every reply, errors of every kind among them; others can read none."""

from __future__ import annotations

import httpx
import pytest

from support.fake_engine import FakeEngine
from support.fakes import connect, exchange, listening, make_app, make_state, parse_reply

pytestmark = pytest.mark.anyio

ORIGIN = "https://app.example"
ASK = {"prompt": "a", "max_tokens": 2}
JSON = {"content-type": "application/json"}


def check(reply: httpx.Response, status: int) -> None:
    assert reply.status_code == status, reply.text
    assert reply.headers["access-control-allow-origin"] == ORIGIN
    assert "origin" in reply.headers["vary"].lower()
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status"),
    [
        ("GET", "/v1/models", {}, b"", 200),
        ("POST", "/v1/completions", JSON, b"{", 400),
        ("POST", "/v1/completions", JSON | {"content-length": "x"}, b"", 400),
        ("GET", "/v1/models", {"authorization": "Bearer wrong"}, b"", 401),
        ("GET", "/debug/kv", {}, b"", 401),
        ("GET", "/v1/models", {"host": "evil.example"}, b"", 403),
        ("GET", "/nothing", {}, b"", 404),
        ("PUT", "/v1/models", {}, b"", 405),
        ("POST", "/v1/completions", JSON, b"x" * 5000, 413),
        ("POST", "/v1/completions", JSON | {"content-encoding": "br"}, b"x", 415),
        ("POST", "/v1/completions", {"content-type": "text/plain"}, b"{}", 415),
        ("GET", "/v1/models", {"x-large": "x" * 4000}, b"", 431),
    ],
)
async def test_every_refusal_can_be_read(
    method: str, path: str, headers: dict[str, str], content: bytes, status: int
) -> None:
    app = make_app(
        api_key=("key",),
        admin_api_key=("operator",),
        allowed_origins=(ORIGIN,),
        allowed_hosts=("server",),
        max_body_bytes=4096,
        max_header_bytes=2048,
    )
    async with connect(app, headers={"origin": ORIGIN, "authorization": "Bearer key"}) as client:
        check(await client.request(method, path, headers=headers, content=content), status)


async def test_so_can_what_goes_wrong_later() -> None:
    for engine, status in ((FakeEngine(fail_after=1), 500), (FakeEngine(), 503)):
        state = make_state(engine=engine, allowed_origins=(ORIGIN,))
        state.phase.draining = status == 503
        async with connect(make_app(state), headers={"origin": ORIGIN}) as client:
            check(await client.post("/v1/completions", json=ASK), status)


async def test_and_an_unexpected_fault() -> None:
    app = make_app(allowed_origins=(ORIGIN,))

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("a bug")

    async with connect(app, headers={"origin": ORIGIN}) as client:
        check(await client.get("/broken"), 500)


async def test_a_body_that_is_too_slow() -> None:
    async with listening(make_app(allowed_origins=(ORIGIN,), body_timeout=0.2)) as server:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nOrigin: {ORIGIN}\r\nContent-Type: application/json\r\n"
        raw = await exchange(server.port, head.encode() + b"Content-Length: 9\r\n\r\n")
        check(parse_reply(raw), 408)


async def test_other_origins_get_nothing_that_a_browser_would_show() -> None:
    async with connect(make_app(allowed_origins=(ORIGIN,))) as client:
        for path in ("/v1/models", "/nothing"):
            reply = await client.get(path, headers={"origin": "https://evil.example"})
            assert "access-control-allow-origin" not in reply.headers
            assert "origin" in reply.headers["vary"].lower()
    async with connect(make_app()) as client:
        assert "vary" not in (await client.get("/v1/models", headers={"origin": ORIGIN})).headers


async def test_a_preflight_needs_no_key_and_is_one_reply() -> None:
    ask = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-any"}
    async with connect(make_app(api_key=("key",), allowed_origins=(ORIGIN,))) as client:
        reply = await client.options("/v1/completions", headers=ask)
        assert reply.status_code == 200
        assert reply.headers.get_list("access-control-allow-origin") == [ORIGIN]
        assert reply.headers["access-control-allow-headers"] == "x-any"
        assert reply.headers["x-request-id"]
        refused = await client.options("/v1/completions", headers=ask | {"origin": "https://evil.example"})
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


async def test_any_origin() -> None:
    async with connect(make_app(allowed_origins=("*",))) as client:
        for path in ("/v1/models", "/nothing"):
            assert (await client.get(path, headers={"origin": ORIGIN})).headers["access-control-allow-origin"] == "*"

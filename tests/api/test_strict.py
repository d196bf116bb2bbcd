"""Fields without effect: named in headers, or refused where the operator wants it so. And who may call from a page."""

from __future__ import annotations

import pytest

from support.fake_engine import FakeEngine
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_are_named(path: str) -> None:
    async with connect(make_app()) as client:
        reply = await client.post(path, json=BODIES[path] | {"vendor_field": 1, "x\ny": 2, "nothing": None})
        assert reply.status_code == 200
        assert reply.headers["x-quire-ignored"] == "vendor_field, ?"
        assert reply.headers["x-quire-notes"] == "without effect: vendor_field, ?"
        plain = await client.post(path, json=BODIES[path])
        assert not {"x-quire-ignored", "x-quire-notes"} & set(plain.headers)


@pytest.mark.parametrize("path", BODIES)
async def test_strict_servers_refuse_them(path: str) -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine, strict=True)) as client:
        reply = await client.post(path, json=BODIES[path] | {"vendor_field": 1})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == ("vendor_field", "unknown_parameter")
        assert "vendor_field" in error["message"]
        assert engine.submitted == []
        for harmless in ({}, {"vendor_field": None}):
            assert (await client.post(path, json=BODIES[path] | harmless)).status_code == 200


@pytest.mark.parametrize("fields", [{"priority": 5}, {"reasoning_effort": "low"}, {"store": True}])
async def test_strict_is_about_everything_without_effect(fields: dict[str, object]) -> None:
    path = "/v1/chat/completions"
    async with connect(make_app(strict=True)) as client:
        reply = await client.post(path, json=BODIES[path] | fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(fields)))


async def test_unknown_fields_of_messages_too() -> None:
    body = {"messages": [{"role": "user", "content": "a", "vendor": 1}], "max_tokens": 2}
    async with connect(make_app()) as client:
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.headers["x-quire-ignored"] == "messages.vendor"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
async def test_known_efforts(effort: str) -> None:
    path = "/v1/chat/completions"
    async with connect(make_app()) as client:
        assert (await client.post(path, json=BODIES[path] | {"reasoning_effort": effort})).status_code == 200


@pytest.mark.parametrize("effort", ["", "Low", "extreme", "off", 1, True])
async def test_other_efforts_are_refused(effort: object) -> None:
    path = "/v1/chat/completions"
    async with connect(make_app()) as client:
        reply = await client.post(path, json=BODIES[path] | {"reasoning_effort": effort})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize("origins", [("http://page.example",), ("*",)])
async def test_sdks_in_browsers_pass_the_preflight(origins: tuple[str, ...]) -> None:
    """With the headers that the SDKs of OpenAI and Anthropic send from a page."""
    sent = (
        "authorization,content-type,x-api-key,anthropic-version,anthropic-dangerous-direct-browser-access,x-request-id,"
        "x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-retry-count,"
        "x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout,x-stainless-helper-method"
    )
    async with connect(make_app(allowed_origins=origins, api_key=("key",))) as client:
        origin = {"origin": "http://page.example"}
        for method in ("GET", "POST", "DELETE"):
            asked = {"access-control-request-method": method, "access-control-request-headers": sent}
            reply = await client.options("/v1/chat/completions", headers=origin | asked)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == origins[0]
            assert set(sent.split(",")) <= set(
                reply.headers["access-control-allow-headers"].replace(" ", "").split(",")
            )
            assert method in reply.headers["access-control-allow-methods"]
            # Keys travel in headers: no cookie is wanted, so no page may send one.
            assert "access-control-allow-credentials" not in reply.headers
        keyed = origin | {"authorization": "Bearer key"}
        path = "/v1/chat/completions"
        reply = await client.post(path, json=BODIES[path] | {"vendor_field": 1}, headers=keyed)
        assert reply.status_code == 200
        exposed = reply.headers["access-control-expose-headers"]
        for name in ("x-request-id", "retry-after", "x-quire-notes", "x-quire-ignored"):
            assert name in exposed

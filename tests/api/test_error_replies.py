"""Every failure is the OpenAI envelope, with a request id, whoever noticed it."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from fastapi import HTTPException, Request

from quire_server.routes import elsewhere
from support.fakes import MODEL, connect, documented_paths, make_app, make_state

pytestmark = pytest.mark.anyio


def check_envelope(reply: httpx.Response, status: int, code: str | None = None) -> dict[str, object]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert len(reply.content) <= 2048
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    for leak in ("Traceback", "0x7", "/site-packages/", "object at", "<class"):
        assert leak not in reply.text
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "code"),
    [
        ("GET", "/nothing", {}, 404, "not_found"),
        ("GET", "/v1/nothing", {}, 404, "not_found"),
        ("DELETE", "/v1/models", {}, 405, "method_not_allowed"),
        ("GET", "/tokenize", {}, 405, "method_not_allowed"),
        ("POST", "/tokenize", {"json": [1]}, 400, "invalid_json"),
        ("POST", "/tokenize", {"json": {"prompt": 1}}, 400, "invalid_value"),
        ("POST", "/tokenize", {"json": {"prompt": "a", "model": "x"}}, 404, "model_not_found"),
        ("POST", "/tokenize", {"content": b"{}"}, 415, "unsupported_media_type"),
        ("POST", "/tokenize", {"data": {"prompt": "a"}}, 415, "unsupported_media_type"),
    ],
)
async def test_envelope(method: str, path: str, options: dict[str, object], status: int, code: str | None) -> None:
    async with connect(make_app()) as client:
        check_envelope(await client.request(method, path, **options), status, code)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        *[(path, "/v1/completions") for path in ("/completion", "/generate", "/completions/")],
        *[(path, "/v1/chat/completions") for path in ("/chat/completions", "/v1/chat")],
        ("/v1/engines/davinci/completions", "/v1/completions"),
        ("/engines/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/gpt-4o/chat/completions", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/tokenize", "/tokenize"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/engines/ada/embeddings", "/v1/embeddings"),
        ("/healthz", "/health"),
    ],
)
async def test_a_route_that_is_elsewhere_says_where(path: str, route: str) -> None:
    async with connect(make_app()) as client:
        error = check_envelope(await client.post(path, json={}), 404, "not_found")
    assert error["message"] == f"There is no such route. Use {route}."


@pytest.mark.parametrize("path", ["/v1/batches/b1/cancel", "/v1/files", "/v1/files/f1/content"])
async def test_a_server_without_batches_says_what_it_needs(path: str) -> None:
    method = "GET" if path.endswith("content") else "POST"
    async with connect(make_app()) as client:
        error = check_envelope(await client.request(method, path), 404, "batches_off")
        assert "--batch-dir" in str(error["message"])
        error = check_envelope(await client.post("/v1/uploads", json={}), 404, "not_found")
        assert "Use /v1/files" in str(error["message"])


async def test_a_base_url_with_v1_twice_is_told() -> None:
    async with connect(make_app()) as client:
        error = check_envelope(await client.post("/v1/v1/chat/completions", json={}), 404, "not_found")
        assert "'/v1' occurs twice" in str(error["message"])
        error = check_envelope(await client.get("/v1/nothing"), 404, "not_found")
        assert error["message"] == "There is no such route."


async def test_only_routes_that_exist_are_recommended_and_none_is_shadowed() -> None:
    served = set(documented_paths()) | {"/openapi.json"}
    recommended = {*elsewhere._ELSEWHERE.values(), *(route for _, route in elsewhere._PATTERNS)}
    assert recommended <= served
    assert not served & elsewhere._ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/health//", "../../health"),
        ("/tokenize/?a=b%20c", "../tokenize?a=b%20c"),
        ("/llm/v1/chat/completions/", "../completions"),
        ("/v1/nothing/", None),
        ("//evil.example/", None),
    ],
)
async def test_a_slash_too_many_leads_to_the_route_on_the_same_host(path: str, location: str | None) -> None:
    async with connect(make_app(root_path="/llm")) as client:
        reply = await client.post(f"http://server{path}", headers={"host": "evil.example"})
        if location is None:
            check_envelope(reply, 404, "not_found")
        else:
            assert (reply.status_code, reply.headers["location"]) == (307, location)


async def test_clients_follow_a_slash_too_many_with_their_body() -> None:
    async with connect(make_app(), follow_redirects=True) as client:
        assert (await client.post("/tokenize/", json={"prompt": "ab"})).json()["count"] == 2
        assert (await client.get("/v1/models/")).json() == (await client.get("/v1/models")).json()
        assert (await client.get(f"/v1/models/{MODEL}/")).json()["id"] == MODEL


async def test_method_not_allowed_names_the_methods() -> None:
    async with connect(make_app()) as client:
        assert (await client.get("/detokenize")).headers["allow"] == "POST"


async def test_an_unexpected_exception_is_500_with_a_fixed_text(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()

    @app.get("/boom")
    async def boom() -> None:
        raise ValueError("secret in /home/user at 0x7f0000000000")

    async with connect(app) as client:
        reply = await client.get("/boom", headers={"x-request-id": "abc"})
    error = check_envelope(reply, 500, "internal_error")
    assert "secret" not in str(error)
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.request_id for record in logged] == ["abc"]
    assert "secret" in str(logged[0].exc_info)


async def test_the_frameworks_own_errors_are_enveloped() -> None:
    app = make_app()

    @app.get("/typed/{number}")
    async def typed(number: int) -> int:
        return number

    @app.get("/teapot")
    async def teapot() -> None:
        raise HTTPException(418, detail={"a": object()})

    async with connect(app) as client:
        check_envelope(await client.get("/typed/x"), 400)
        check_envelope(await client.get("/teapot"), 500)


@pytest.mark.parametrize("sent", ["abc", "A.b-c_9", "x" * 128])
async def test_a_clean_request_id_is_echoed(sent: str) -> None:
    async with connect(make_app()) as client:
        for path in ("/health", "/nothing"):
            assert (await client.get(path, headers={"x-request-id": sent})).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a b", "a%0d%0aSet-Cookie: x", "a\tb", "x" * 129, "x" * 10_000, "é", "😀", "a/b"])
async def test_any_other_request_id_is_replaced(sent: str) -> None:
    async with connect(make_app()) as client:
        reply = await client.get("/health", headers=[(b"x-request-id", sent.encode())])
    assert reply.headers.get_list("x-request-id") == [reply.headers["x-request-id"]]
    assert reply.headers["x-request-id"].startswith("req-")
    assert reply.headers["x-request-id"].isascii()


async def test_request_ids_are_distinct() -> None:
    async with connect(make_app()) as client:
        ids = {(await client.get("/health")).headers["x-request-id"] for _ in range(20)}
    assert len(ids) == 20


async def test_one_access_log_line_per_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire.access")
    async with connect(make_app()) as client:
        await client.get("/v1/models?key=secret", headers={"x-request-id": "one"})
        await client.get("/v1/%0Aforged%20line", headers={"x-request-id": "two"})
        for path in ("/health", "/health/live", "/metrics"):
            await client.get(path)
    lines = [record for record in caplog.records if record.name == "quire.access"]
    assert [record.request_id for record in lines] == ["one", "two"]
    assert lines[0].getMessage().startswith("GET /v1/models 200 ")
    assert "\n" not in lines[1].getMessage()
    assert "secret" not in caplog.text


async def test_the_access_log_can_be_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire.access")
    async with connect(make_app(disable_access_log=True)) as client:
        await client.get("/v1/models")
    assert not [record for record in caplog.records if record.name == "quire.access"]


async def test_clients_cannot_make_metric_labels() -> None:
    state = make_state()
    async with connect(make_app(state)) as client:
        await client.get("/v1/models/nothing")
        await client.get("/nothing")
        await client.request("BREW", "/nothing")
        before = len(state.metrics.render())
        for i in range(300):
            await client.get(f"/v1/models/nothing-{i}")
            await client.get(f"/nothing-{i}")
            await client.request(f"BREW{i}", "/nothing", headers={"x-request-id": f"id-{i}"})
        after = len(state.metrics.render())
    assert after < before * 1.05


async def test_cors_is_closed_by_default() -> None:
    async with connect(make_app()) as client:
        reply = await client.get("/v1/models", headers={"origin": "http://page.example"})
        assert "access-control-allow-origin" not in reply.headers
        preflight = {"origin": "http://page.example", "access-control-request-method": "POST"}
        assert (await client.options("/tokenize", headers=preflight)).status_code == 405


async def test_cors_for_named_origins() -> None:
    app = make_app(allowed_origins=("http://page.example",), api_key=("key",))
    async with connect(app) as client:
        preflight = {"origin": "http://page.example", "access-control-request-method": "POST"}
        reply = await client.options("/tokenize", headers=preflight)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "http://page.example"
        refused = await client.post("/tokenize", json={}, headers={"origin": "http://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "http://page.example"
        other = await client.options("/tokenize", headers={**preflight, "origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_requests_do_not_share_their_state() -> None:
    app = make_app()
    arrived = asyncio.Event()

    @app.get("/me")
    async def me(request: Request, wait: bool = False) -> str:
        if wait:
            await arrived.wait()
        arrived.set()
        return str(request.state.request_id)

    async with connect(app) as client:
        slow = asyncio.create_task(client.get("/me?wait=true", headers={"x-request-id": "slow"}))
        await asyncio.sleep(0.01)
        assert (await client.get("/me", headers={"x-request-id": "fast"})).json() == "fast"
        assert (await slow).json() == "slow"

"""The key: needed everywhere but on the public paths, whatever the path looks like and however it is brought."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path

import httpx
import pytest

from quire_server.http.guard import PUBLIC_PATHS, is_admin_path
from quire_server.logs import JsonFormatter, TextFormatter
from support.fakes import MODEL, connect, documented_paths, exchange, listening, make_app, parse_reply

pytestmark = pytest.mark.anyio

KEY = "sk-0123456789-äö"
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "PATCH")


def bearer(key: str, scheme: str = "Bearer") -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"{scheme} {key}".encode())]


def check_refusal(reply: httpx.Response) -> None:
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"].startswith("Bearer")
    assert reply.headers["x-request-id"]
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_every_route_and_method_needs_the_key() -> None:
    app = make_app(api_key=(KEY,))
    paths = [path.replace("{model_id}", MODEL) for path in documented_paths()]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/tokenizer_info"} <= set(paths)
    async with connect(app) as client:
        for path, method in itertools.product([*paths, "/docs", "/openapi.json", "/", "/nothing"], METHODS):
            reply = await client.request(method, path)
            if path in PUBLIC_PATHS:
                assert reply.status_code in {200, 405}, (method, path)
            elif is_admin_path(path):  # this key does not open them, and no other would: none is configured
                assert reply.status_code == 403, (method, path)
            else:
                assert reply.status_code == 401, (method, path)


async def test_public_paths_need_no_key() -> None:
    async with connect(make_app(api_key=(KEY,))) as client:
        for path in PUBLIC_PATHS:
            assert (await client.get(path)).status_code == 200


async def test_without_configured_keys_none_is_needed() -> None:
    async with connect(make_app()) as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/models", headers=bearer("whatever"))).status_code == 200


async def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    async with connect(make_app(api_key=(KEY,))) as client:
        assert (await client.get("/v1/models", headers=[(b"x-api-key", KEY.encode())])).status_code == 200
        both = [*bearer("another"), (b"x-api-key", KEY.encode())]
        assert (await client.get("/v1/models", headers=both)).status_code == 200


async def test_the_log_has_the_keys_name_and_never_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire")
    async with connect(make_app(api_key=("alice=0123456789", "=a=b-secret"))) as client:
        for key in ("0123456789", "a=b-secret", "alice=0123456789", "wrong-secret"):
            await client.get("/v1/models", headers=bearer(key))
    records = [record for record in caplog.records if record.name == "quire.access"]
    lines = [TextFormatter().format(record).split("/v1/models ")[1].split(" [")[0] for record in records]
    assert [line.split()[0] for line in lines] == ["200", "200", "401", "401"]
    assert [line.split(" ms")[1] for line in lines] == [" by alice", "", "", ""]
    assert json.loads(JsonFormatter().format(records[0]))["key_name"] == "alice"
    assert not any(secret in caplog.text for secret in ("0123456789", "secret"))


async def test_a_file_has_keys_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nalice=0123456789\n\nplain\n")
    async with connect(make_app(api_key=(f"@{file}",))) as client:
        for key in ("0123456789", "plain"):
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == 200
        check_refusal(await client.get("/v1/models"))


async def test_under_a_root_path_the_same_is_public() -> None:
    """A proxy may take the path away or leave it; neither way opens what needs a key."""
    async with connect(make_app(api_key=(KEY,), root_path="/llm/")) as client:
        for path in PUBLIC_PATHS:
            assert (await client.get(f"/llm{path}")).status_code == (await client.get(path)).status_code == 200
        for path in ("/llm/v1/models", "/v1/models"):
            check_refusal(await client.get(path))
            assert (await client.get(path, headers=bearer(KEY))).json()["data"][0]["id"] == MODEL
        for path in ("/llm/llm/health", "/other/health", "/llm/llm/v1/models", "/llmhealth"):
            check_refusal(await client.get(path))
            assert (await client.get(path, headers=bearer(KEY))).status_code == 404
        document = (await client.get("/llm/openapi.json", headers=bearer(KEY))).json()
        assert document["servers"] == [{"url": "/llm"}]
        assert "/v1/models" in document["paths"]
        assert "/v1/completions" in (await client.post("/llm/completion", headers=bearer(KEY))).text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_each_configured_key_opens(scheme: str) -> None:
    async with connect(make_app(api_key=("first", KEY))) as client:
        for key in ("first", KEY):
            assert (await client.get("/v1/models", headers=bearer(key, scheme))).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        bearer(""),
        bearer("é"),
        bearer(KEY, "Basic"),
        bearer(KEY, "Token"),
        bearer(f"{KEY},{KEY}"),
        bearer(KEY + " "),
        bearer(KEY) + bearer(KEY),
        bearer("x" * 20_000),
        bearer(KEY[:-1]),
        bearer("X" + KEY[1:]),
        bearer(KEY[:-1] + "x"),
        bearer(KEY.upper()),
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer\xff\xfe\x80")],
        [(b"authorization", b"Bearer \xff\xfe\x80")],
        [(b"x-api-key", f"Bearer {KEY}".encode())],
        [(b"x-api-key", KEY[:-1].encode())],
        [(b"x-api-key", KEY.encode()), (b"x-api-key", KEY.encode())],
        [*bearer(KEY), *bearer(KEY), (b"x-api-key", KEY.encode())],
        [(b"proxy-authorization", f"Bearer {KEY}".encode())],
        [(b"cookie", f"authorization=Bearer {KEY}".encode())],
    ],
)
async def test_anything_else_is_401(headers: list[tuple[bytes, bytes]]) -> None:
    async with connect(make_app(api_key=(KEY,))) as client:
        check_refusal(await client.get("/v1/models", headers=headers))


async def test_an_oversized_key_is_refused_before_it_is_looked_at() -> None:
    async with connect(make_app(api_key=(KEY,))) as client:
        assert (await client.get("/v1/models", headers=bearer("x" * 60_000))).status_code == 431


async def test_the_key_is_checked_before_the_body_is_read() -> None:
    async with connect(make_app(api_key=(KEY,))) as client:
        check_refusal(await client.post("/tokenize", content=b"{", headers={"content-type": "text/plain"}))


@pytest.mark.parametrize(
    "target",
    [
        b"//v1/models",
        b"/V1/models",
        b"/v1%2fmodels",
        b"/v1/models/",
        b"/health/../v1/models",
        b"/health/..%2fv1/models",
        b"/health;/v1/models",
        b"/health%00/v1/models",
        b"/health/",
        b"/health/live/../../v1/models",
        b"/v1/models?/health",
        b"/v1/models#/health",
        b"http://localhost/v1/models",
        b"http://localhost/health/../v1/models",
        b"@evil/v1/models",
        b"v1/models",
        b"*",
        b"",
    ],
)
async def test_no_spelling_of_a_path_gets_around_the_key(target: bytes) -> None:
    async with listening(make_app(api_key=(KEY,))) as server:
        raw = await exchange(server.port, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    reply = parse_reply(raw)
    assert reply.status_code in {400, 401, 404}
    assert MODEL not in reply.text
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("host", [b"a/health", b"a?x=", b"a/v1?x=", b"/health", b"", b"evil.example/metrics#"])
async def test_the_host_header_does_not_matter(host: bytes) -> None:
    async with listening(make_app(api_key=(KEY,))) as server:
        head = b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n"
        check_refusal(parse_reply(await exchange(server.port, head)))

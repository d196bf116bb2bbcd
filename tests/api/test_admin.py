"""Who may ask what is the operator's: whoever has an admin key, or where there is none, clients on this machine."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from quire_server.http.listener import bind, serve
from support.fakes import make_app, make_state

pytestmark = pytest.mark.anyio

PATHS = ("/debug/kv", "/debug/steps", "/debug/requests/x", "/debug", "/debug/nothing", "/admin", "/admin/nothing")


def reached(reply: httpx.Response) -> bool:
    """Whether the guard has let the request through: without an engine most routes answer 503, and there are others."""
    assert reply.status_code in {200, 401, 403, 404, 503}, reply.text
    if reply.status_code == 200:
        return True
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    return reply.status_code in {404, 503}


async def get(
    path: str = "/debug/kv",
    *,
    client: str | None = "127.0.0.1",
    headers: dict[str, str] | None = None,
    **settings: object,
) -> httpx.Response:
    app = make_app(make_state(**settings))
    # Without an address, as behind a Unix socket, where the framework's transport must not invent one.
    transport = httpx.ASGITransport(app=app, client=(client, 4711) if client is not None else ("", 0))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as caller:
        return await caller.get(path, headers=headers)


@pytest.mark.parametrize("path", PATHS)
async def test_without_a_key_this_machine_may(path: str) -> None:
    assert reached(await get(path))
    refused = await get(path, client="10.0.0.7")
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_only"
    assert "--admin-api-key" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("client", "open_"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        (None, True),
        ("::ffff:10.0.0.7", False),
        ("10.0.0.7", False),
        ("0.0.0.0", False),
        ("fe80::1", False),
        ("localhost.evil.example", False),
    ],
)
async def test_local_is_who_has_a_loopback_address(client: str | None, open_: bool) -> None:
    assert reached(await get(client=client)) is open_


@pytest.mark.parametrize(
    "headers",
    [
        {"x-forwarded-for": "127.0.0.1"},
        {"X-Forwarded-For": ""},
        {"forwarded": "for=127.0.0.1"},
        {"x-real-ip": "127.0.0.1"},
        {"via": "1.1 proxy"},
        {"x-forwarded-proto": "https"},
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "localhost.evil.example"},
        {"host": "127.0.0.1.evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9000"},
        {"sec-fetch-site": "cross-site"},
    ],
)
async def test_what_a_proxy_or_another_sites_page_sends_is_not_local(headers: dict[str, str]) -> None:
    assert (await get(headers=headers)).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000"},
        {"host": "[::1]:8000"},
        {"host": "quire.localhost"},
        {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
    ],
)
async def test_this_machines_own_pages_may(headers: dict[str, str]) -> None:
    assert reached(await get(headers=headers))


async def test_with_a_key_everyone_needs_it_and_an_api_key_is_none(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ops=0123456789\n")
    settings = {"api_key": ("ordinary",), "admin_api_key": ("operator", f"@{file}")}
    for path in PATHS:
        for key in ("operator", "0123456789"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key, "x-forwarded-for": "1.2.3.4"}):
                assert reached(await get(path, client="10.0.0.7", headers=headers, **settings))
        for wrong in ({}, {"authorization": "Bearer ordinary"}, {"x-api-key": "ops=0123456789"}):
            reply = await get(path, headers=wrong, **settings)
            assert reply.status_code == 401
            assert reply.headers["www-authenticate"].startswith("Bearer")
    assert (await get("/v1/models", headers={"authorization": "Bearer operator"}, **settings)).status_code == 401
    assert (await get("/v1/models", headers={"authorization": "Bearer ordinary"}, **settings)).status_code == 200


@pytest.mark.parametrize("client", ["127.0.0.1", "10.0.0.7", None])
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer ordinary"}])
async def test_with_api_keys_and_no_admin_key_it_is_closed_to_all(
    client: str | None, headers: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("ordinary\n")
    for given in ({"api_key": ("ordinary",)}, {"api_key": (f"@{file}",)}):
        reply = await get(client=client, headers=headers, **given)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_only")
        assert "--admin-api-key" in reply.json()["error"]["message"]
        assert "--allow-local-admin" in reply.json()["error"]["message"]
        local = await get(client=client, headers=headers, allow_local_admin=True, **given)
        assert reached(local) is (client != "10.0.0.7")


async def test_with_an_admin_key_this_machine_needs_it_too() -> None:
    assert (await get(admin_api_key=("operator",), allow_local_admin=True)).status_code == 401


@pytest.mark.parametrize("path", ["/llm/debug/kv", "/debug/kv"])
async def test_under_a_root_path_it_is_guarded_too(path: str) -> None:
    assert (await get(path, client="10.0.0.7", root_path="/llm")).status_code == 403
    assert reached(await get(path, root_path="/llm"))


@pytest.mark.parametrize("path", ["/debugger", "/v1/debug/kv", "/adminx"])
async def test_a_path_that_only_looks_like_it_needs_the_ordinary_key(path: str) -> None:
    assert (await get(path, api_key=("ordinary",))).status_code == 401


async def test_a_unix_socket_is_local(tmp_path: Path) -> None:
    import asyncio

    state = make_state(uds=tmp_path / "quire.sock")
    started: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(make_app(state), state.settings, sock=bind(state.settings), on_started=started.set_result)
    )
    listening = await started
    try:
        transport = httpx.AsyncHTTPTransport(uds=str(state.settings.uds))
        async with httpx.AsyncClient(transport=transport, base_url="http://anything") as caller:
            assert reached(await caller.get("/debug/kv"))
            assert not reached(await caller.get("/debug/kv", headers={"x-forwarded-for": "10.0.0.7"}))
    finally:
        listening.stop(True)
        await serving

"""The pages for people: whole without any other site, open without a key, and nothing in them needs trust."""

from __future__ import annotations

import re

import pytest

from quire_server.http.guard import PAGES
from quire_server.routes.pages import _FILES
from quire_server.text.markdown import MOST_CHARS, MOST_TEXTS
from support.fakes import connect, listening, make_app

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_pages_are_open_and_closed_to_other_sites(method: str) -> None:
    async with connect(make_app(api_key=("secret",))) as client:
        replies = {path: await client.request(method, path) for path in PAGES}
    for path, reply in replies.items():
        assert reply.status_code == 200, path
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none';"), path
        assert "unsafe" not in policy, path
        assert "http" not in policy, path
        assert reply.headers["x-content-type-options"] == "nosniff", path
        is_text = reply.headers["content-type"].endswith("; charset=utf-8")
        assert is_text == (not path.endswith((".svg", ".ico"))), path


def test_only_the_pages_files_are_open() -> None:
    parts = {f"/pages/{name}" for name in _FILES if not name.endswith(".html")}
    assert parts | {"/", "/docs", "/dashboard", "/learn", "/favicon.ico"} == PAGES


@pytest.mark.parametrize("name", ["index.html", "docs.html", "../guard.py", "nothing.js", ""])
async def test_nothing_else_is_served(name: str) -> None:
    async with connect(make_app()) as client:
        reply = await client.get(f"/pages/{name}")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("name", sorted(_FILES))
def test_everything_comes_from_here(name: str) -> None:
    """No address of another site, and every file that is named is there; nothing that the policy would block."""
    text = _FILES[name].decode()
    addresses = set(re.findall(r"https?://[^\s\"'<`/]+", text))
    assert addresses <= {"http://localhost:8000", "http://www.w3.org"}  # an example, and the name of SVG
    for named in re.findall(r"(?:src|href)=\"(?:pages/)?([\w.]+\.(?:js|css|svg))\"|from \"\./([\w.]+)\"", text):
        assert "".join(named) in _FILES
    assert not re.search(r"\sstyle=|\son[a-z]+=\"|<style|<script(?! type=\"module\" src=)|innerHTML|\beval\(", text)


async def test_who_asks_for_json_gets_json() -> None:
    async with connect(make_app(api_key=("secret",))) as client:
        for accepted, kind in [
            ("application/json", "application/json"),
            ("text/html,application/xhtml+xml,application/json;q=0.9,*/*;q=0.8", "text/html"),
            ("*/*", "text/html"),
        ]:
            reply = await client.get("/", headers={"accept": accepted})
            assert reply.headers["content-type"].split(";")[0] == kind
            assert reply.headers["vary"] == "accept"
        where = (await client.get("/", headers={"accept": "application/json"})).json()
        assert where.pop("name") == "quire"
        assert where.pop("version")
        for path in where.values():
            assert (await client.get(path, headers={"authorization": "Bearer secret"})).status_code == 200


async def test_a_head_has_no_body_on_the_wire() -> None:
    from support.fakes import exchange

    async with listening(make_app()) as server:
        raw = await exchange(server.port, b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b""
    assert b"content-length: " + str(len(_FILES["index.html"])).encode() in head


async def test_pages_are_not_part_of_the_described_api() -> None:
    async with connect(make_app()) as client:
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert not {path for path in paths if path in PAGES or "pages" in path}


async def test_markdown_is_rendered_for_who_may_ask() -> None:
    """By the rules of every route that takes work: a key, no page of another site, bounded texts."""
    app = make_app(api_key=("secret",))
    key = {"authorization": "Bearer secret"}
    async with connect(app) as client:
        assert (await client.post("/pages/render", json={"texts": ["a"]})).status_code == 401
        reply = await client.post("/pages/render", json={"texts": ["**a**", "`b`"]}, headers=key)
        assert reply.json() == {"html": ["<p><strong>a</strong></p>\n", "<p><code>b</code></p>\n"]}
        assert reply.headers["cache-control"] == "no-store"
        for texts in (["a"] * (MOST_TEXTS + 1), ["a" * MOST_CHARS, "b"]):
            reply = await client.post("/pages/render", json={"texts": texts}, headers=key)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "text_too_long")
    app.state.markdown.close()
    async with connect(make_app()) as client:
        reply = await client.post("/pages/render", json={"texts": ["a"]}, headers={"origin": "https://evil.example"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")

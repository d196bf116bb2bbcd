"""Pages of other sites change nothing on a server without keys; its own pages, programs and allowed sites do."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.batches import batching
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio

OURS = {"host": "127.0.0.1:8000"}
FOREIGN = {
    "another site": {"origin": "https://evil.example"},
    "a sandbox": {"origin": "null"},
    "another port": {"origin": "http://127.0.0.1:9000", "sec-fetch-site": "same-site"},
    "without an origin": {"sec-fetch-site": "cross-site"},
    "a name of ours in another": {"origin": "http://127.0.0.1:8000.evil.example"},
    "a cached password": {"origin": "https://evil.example", "authorization": "Basic eDp5"},
}
WELCOME = {
    "a program": {},
    "our page": {"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"},
    "our page, an old browser": {"origin": "http://127.0.0.1:8000"},
    "behind a proxy": {"origin": "https://llm.example", "x-forwarded-host": "llm.example:443, inner"},
    "behind a proxy that names none": {"origin": "https://llm.example", "sec-fetch-site": "same-origin"},
    "typed by a user": {"sec-fetch-site": "none"},
    "an extension": {"origin": "chrome-extension://abcdef"},
    "an allowed site": {"origin": "https://app.example", "sec-fetch-site": "cross-site"},
    "with a key, as a proxy passes it on": {"origin": "https://llm.example", "authorization": "Bearer EMPTY"},
}


@pytest.mark.parametrize("name", FOREIGN)
async def test_a_foreign_page_keeps_no_file_and_asks_for_nothing(name: str, tmp_path: Path) -> None:
    async with batching(tmp_path, headers=OURS) as client:
        form = {"files": {"file": ("in.jsonl", b"x")}, "data": {"purpose": "batch"}}
        for method, path, more in (
            ("POST", "/v1/files", form),
            ("POST", "/v1/completions", {"json": {"prompt": "a", "max_tokens": 1}}),
            ("POST", "/admin/reload", {}),
            ("DELETE", "/v1/files/file-x", {}),
            ("POST", "/not/there", {}),
        ):
            reply = await client.request(method, path, headers=FOREIGN[name], **more)
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed"), path
        assert (await client.get("/v1/models", headers=FOREIGN[name])).status_code == 200, "reading is CORS's business"
        assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("name", WELCOME)
async def test_others_are_let_in(name: str) -> None:
    app = make_app(allowed_origins=("https://app.example",))
    async with connect(app, headers=OURS | WELCOME[name]) as client:
        reply = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert reply.status_code == 200, reply.text


async def test_with_any_origin_allowed_all_are_let_in() -> None:
    async with connect(make_app(allowed_origins=("*",)), headers=FOREIGN["another site"]) as client:
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code == 200

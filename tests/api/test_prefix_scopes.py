"""Whose cached prefixes a request may share: its tenant's or its key's alone, in every dialect."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from quire_engine.contract.block_hashes import root_hash
from support.fake_engine import FakeEngine
from support.fakes import MODEL, connect, make_app, make_state

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "a"}]
ASKED: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
PLAIN, SALTED = {}, {"cache_salt": "x"}


async def roots(path: str, keys: list[str], **settings: object) -> list[bytes]:
    """The hashes with which the prefixes begin: of each key's request without a salt and of the one with a salt."""
    engine = FakeEngine()
    found = []
    async with connect(make_app(make_state(engine=engine, **settings))) as client:
        for key in keys:
            for salt in (PLAIN, SALTED):
                await client.post(path, json=ASKED[path] | {"model": MODEL} | salt, headers={"x-api-key": key})
                (root,) = {root_hash(request.cache_salt) for request in engine.submitted}
                engine.submitted.clear()
                found.append(root)
    return found


@pytest.mark.parametrize("path", ASKED)
async def test_each_key_has_its_own(path: str) -> None:
    one, one_salted, two, two_salted, *again = await roots(path, ["one", "two", "one"], api_key=["one", "two"])
    assert len({one, one_salted, two, two_salted}) == 4
    assert again == [one, one_salted]


@pytest.mark.parametrize("path", ASKED)
async def test_a_server_without_keys_has_one_for_all(path: str) -> None:
    assert await roots(path, ["one", "two"]) == [root_hash(""), root_hash("x")] * 2


async def test_tenants_share_within_their_group(tmp_path: Path) -> None:
    entries = [
        {"name": name, "key_sha256": [hashlib.sha256(key.encode()).hexdigest() for key in keys]} | more
        for name, keys, more in (
            ("a", ["a1", "a2"], {}),
            ("b", ["b"], {}),
            ("c", ["c"], {"prefix_group": "friends"}),
            ("friends", ["d"], {}),
            ("e", ["e"], {"prefix_group": "friends"}),
        )
    ]
    file = tmp_path / "tenants.yaml"
    file.write_text(yaml.safe_dump({"tenants": entries}))
    found = await roots("/v1/completions", ["a1", "a2", "b", "c", "d", "e"], tenants=file)
    first, second, other, one_friend, named_so, another_friend = (found[i : i + 2] for i in range(0, 12, 2))
    assert first == second, "keys of one tenant"
    assert one_friend == another_friend
    assert len({*first, *other, *one_friend, *named_so}) == 8


@pytest.mark.parametrize("salt", ["tenant a\x00", "\x00", "group friends\x00x"])
async def test_no_salt_can_name_a_scope(salt: str) -> None:
    engine = FakeEngine()
    async with connect(make_app(make_state(engine=engine))) as client:
        answer = await client.post("/v1/completions", json=ASKED["/v1/completions"] | {"cache_salt": salt})
    assert answer.status_code == 400
    assert not engine.submitted

"""How large bodies may be, and how much of them may be held."""

from __future__ import annotations

import json

import pytest

from quire_server.dialects.common import MAX_ALLOWED_TOKENS, MAX_PROMPTS
from quire_server.errors import NotReady
from quire_server.http.body_limits import (
    FREE_BYTES,
    LARGEST_BODY,
    OWN_BYTES,
    BodyBudget,
    BodyBuffer,
    BodyHold,
    BodyLimits,
    declared_bytes,
)


@pytest.mark.parametrize("context", [128, 2048, 8192])
def test_what_a_context_takes_fits(context: int) -> None:
    limit = BodyLimits(max_body_bytes=None, max_model_len=context).of("/v1/completions")
    ids = json.dumps({"prompt": [[32_000] * context] * MAX_PROMPTS}, separators=(",", ":"))
    text = json.dumps({"prompt": ["They say so. " * (context // 4)] * MAX_PROMPTS})
    allowed = json.dumps({"prompt": "a", "allowed_token_ids": list(range(MAX_ALLOWED_TOKENS))})
    for body in (ids, text, allowed):
        assert len(body) <= limit.max_bytes
        assert body.count(",") <= limit.max_values


def test_the_limit_follows_from_the_context() -> None:
    assert BodyLimits(max_body_bytes=None, max_model_len=2048).of("/v1/chat/completions").max_bytes == 3 << 19
    assert BodyLimits(max_body_bytes=None, max_model_len=131_072).of("/v1/chat/completions").max_bytes == LARGEST_BODY


def test_embeddings_take_a_million_tokens_whatever_the_context() -> None:
    limits = BodyLimits(max_body_bytes=None, max_model_len=512, root_path="/llm")
    for path in ("/v1/embeddings", "/llm/v1/embeddings", "/v1/score", "/score"):
        assert limits.of(path).max_bytes == LARGEST_BODY == limits.largest
        assert limits.of(path).max_values > 1 << 20
    assert limits.of("/v1/completions").max_bytes < 1 << 20


def test_an_explicit_limit_is_for_all() -> None:
    limits = BodyLimits(max_body_bytes=1000, max_model_len=512)
    for path in ("/v1/completions", "/v1/embeddings"):
        assert limits.of(path).max_bytes == 1000
        assert limits.of(path).too_large().code == "payload_too_large"
    derived = BodyLimits(max_body_bytes=None, max_model_len=512).of("/v1/completions").too_large()
    assert (derived.status, derived.code) == (413, "context_length_exceeded")
    assert "512 tokens" in derived.message


@pytest.mark.parametrize(
    ("headers", "declared"),
    [
        ([], 0),
        ([(b"content-length", b"12")], 12),
        ([(b"content-length", b"x")], None),
        ([(b"content-length", b"9" * 30)], None),
        ([(b"transfer-encoding", b"chunked")], None),
    ],
)
def test_what_a_head_announces(headers: list[tuple[bytes, bytes]], declared: int | None) -> None:
    assert declared_bytes(headers) == declared


def test_all_that_is_held_is_counted_and_given_back() -> None:
    told: list[int] = []
    budget = BodyBudget(4 * FREE_BYTES, told.append)
    small, first, second = BodyHold(budget), BodyHold(budget), BodyHold(budget)
    small.grow(FREE_BYTES)
    assert budget.held == 0
    for _ in range(4):
        first.grow(FREE_BYTES // 2)
    assert budget.held == 2 * FREE_BYTES
    second.grow(2 * FREE_BYTES)
    assert budget.held == 4 * FREE_BYTES
    assert budget.has_room(FREE_BYTES)
    assert not budget.has_room(FREE_BYTES + 1)
    with pytest.raises(NotReady) as refused:
        small.grow(1)
    assert 1 <= int(refused.value.headers["Retry-After"]) <= 30
    with pytest.raises(NotReady):
        first.grow(1)
    assert budget.held == 2 * FREE_BYTES  # what is refused is let go
    for hold in (first, second, second, small):
        hold.release()
        hold.grow(FREE_BYTES * 2)  # what lingers afterwards is dropped
    assert budget.held == 0
    assert told[-1] == 0
    assert max(told) == 4 * FREE_BYTES


@pytest.mark.parametrize("size", [0, 10, OWN_BYTES, OWN_BYTES + 1, 3 * OWN_BYTES + 5])
def test_a_body_is_what_has_arrived(size: int) -> None:
    for most in (size, 4 * OWN_BYTES):
        buffer = BodyBuffer(most)
        sent = bytes(i % 251 for i in range(size))
        for start in range(0, size, 70_000):
            buffer.add(sent[start : start + 70_000])
        buffer.add(b"")
        whole = buffer.take()
        assert len(whole) == size
        assert whole[:] == sent
        assert isinstance(whole, bytes) == (size <= OWN_BYTES)
        assert buffer.take() == b""

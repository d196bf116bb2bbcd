"""A model with bidirectional attention over HTTP: vectors and their scores, and the refusal of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.served import Served
from support.embedding_gemma import EmbeddingGemma

pytestmark = pytest.mark.e2e

TEXTS = ["What is a ream?", "A quire is four sheets of paper; a ream is twenty quires. " * 8, "Paris"]


def test_it_makes_vectors_and_no_text(tmp_path: Path) -> None:
    gemma = EmbeddingGemma(tmp_path)
    vectors = [gemma.vector(text) for text in TEXTS]
    flags = ("--device", "cpu", "--max-model-len", "300", "--kv-memory", "8MiB", "--log-level", "debug")
    with Served(str(tmp_path), *flags) as server:

        def post(path: str, status: int = 200, **body: Any) -> dict[str, Any]:
            reply = httpx.post(server.url + path, json=body, timeout=60)
            assert reply.status_code == status, reply.text
            found: dict[str, Any] = reply.json()
            return found

        assert "300 of one prompt; each whole, since attention is bidirectional; prefix caching off" in server.log()
        assert f"try: curl {server.url}/v1/embeddings " in server.log()
        found = post("/v1/embeddings", input=TEXTS)
        for entry, vector in zip(found["data"], vectors, strict=True):
            assert entry["embedding"] == pytest.approx(vector.tolist(), abs=1e-4)
        again = post("/v1/embeddings", input=TEXTS[::-1])
        assert [entry["embedding"] for entry in again["data"][::-1]] == [entry["embedding"] for entry in found["data"]]
        scores = post("/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:])
        expected = [float(vectors[0] @ vector) for vector in vectors[1:]]
        assert [entry["score"] for entry in scores["data"]] == pytest.approx(expected, abs=1e-4)
        for path, body in (
            ("/v1/completions", {"prompt": "Paris", "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Paris"}]}),
            ("/v1/responses", {"input": "Paris"}),
        ):
            error = post(path, 400, **body)["error"]
            assert error["code"] == "generation_not_supported"
            assert "its attention is bidirectional" in error["message"]
        error = post("/v1/embeddings", 400, input="Paris " * 400)["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert server.metric("quire_engine_restarts_total") == 0

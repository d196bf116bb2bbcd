"""Images in the messages of every dialect: refused, or a text of the operator's in their place."""

from __future__ import annotations

from typing import Any

import pytest

from support.fake_engine import FakeEngine
from support.fake_tokenizer import load_tokenizer
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio

PICTURE = "[picture]"
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
INPUT = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
HI = {"type": "text", "text": "hi"}
USE = {"type": "tool_use", "id": "a", "name": "see", "input": {}}
CALL = {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [HI, URL]}]}),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": [INPUT]}]}),
    "a call's output": (
        "/v1/responses",
        {"input": [CALL, {"type": "function_call_output", "call_id": "a", "output": [INPUT]}]},
    ),
    "messages": ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [BLOCK, HI]}]}),
    "a tool's result": (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [USE]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [BLOCK]}]},
            ],
        },
    ),
    "ollama's chat": ("/api/chat", {"messages": [{"role": "user", "content": "hi", "images": ["AAAA"]}]}),
    "ollama's generate": ("/api/generate", {"prompt": "hi", "images": ["AAAA"]}),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_operators_text_stands_for_an_image(name: str) -> None:
    path, fields = REQUESTS[name]
    engine = FakeEngine()
    body = {"model": "fake", "stream": False, **fields}
    async with connect(make_app(engine=engine, image_placeholder=PICTURE)) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-quire-ignored"] == "image_content"
    (request,) = engine.submitted
    assert PICTURE in load_tokenizer().decode(request.prompt_token_ids)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("settings", [{}, {"image_placeholder": PICTURE, "strict": True}])
async def test_without_one_an_image_is_refused(name: str, settings: dict[str, object]) -> None:
    path, fields = REQUESTS[name]
    async with connect(make_app(**settings)) as client:
        reply = await client.post(path, json={"model": "fake", "stream": False, **fields})
    assert reply.status_code == 400, reply.text


async def test_a_request_without_images_stays_as_it_is() -> None:
    async with connect(make_app(image_placeholder=PICTURE)) as client:
        reply = await client.post(
            "/v1/chat/completions", json={"model": "fake", "messages": [{"role": "user", "content": [HI]}]}
        )
    assert reply.status_code == 200
    assert "x-quire-ignored" not in reply.headers

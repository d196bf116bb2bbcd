"""The official `openai` client against the real listener and a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import openai
import pytest

from support.fake_engine import REPLY, FakeEngine
from support.fake_tokenizer import EOS
from support.fakes import listening, make_app

FOX = REPLY.decode()
USER = [{"role": "user", "content": "hi"}]


class Server:
    """A server on a thread of its own, so that the synchronous client can be used too."""

    def __init__(self, **engine: object) -> None:
        self._engine = engine
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(300)
        return f"http://127.0.0.1:{self.port}/v1"

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(300)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = make_app(engine=FakeEngine(**self._engine), max_queued_sequences=8)
        async with listening(app) as server:
            self.port = server.port
            self._ready.set()
            await self._stop.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Server() as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="a", temperature=0, max_tokens=9)
    assert reply.choices[0].text == FOX[:9]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == 10
    assert reply._request_id
    assert reply.id == f"cmpl-{reply._request_id}"


def test_completion_stream(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(model="fake", prompt="a", temperature=0, max_tokens=9, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == FOX[:9]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 8 + ["length"]


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=USER, temperature=0, max_completion_tokens=9, n=2)
    assert [choice.message.content for choice in reply.choices] == [FOX[:9]] * 2
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=USER,
            temperature=0,
            max_tokens=9,
            stop=["brown"],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == FOX[:9]
    assert chunks[-1].usage.completion_tokens == 9


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=USER, temperature=0, stop="brown") as events:
        assert events.get_final_completion().choices[0].message.content == "The quick "


def test_logprobs(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="fake", messages=USER, temperature=0, max_tokens=2, logprobs=True, top_logprobs=2
    )
    assert [entry.token for entry in chat.choices[0].logprobs.content] == ["T", "h"]
    assert [top.token for top in chat.choices[0].logprobs.content[0].top_logprobs] == ["T", "U"]
    text = client.completions.create(model="fake", prompt="ab", temperature=0, max_tokens=1, logprobs=1, echo=True)
    assert text.choices[0].logprobs.tokens == ["a", "b", "T"]
    assert text.choices[0].logprobs.token_logprobs[0] is None


def test_extensions_in_the_extra_body(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="fake", messages=USER, max_tokens=4, extra_body={"top_k": 1, "min_p": 0.1, "return_token_ids": True}
    )
    assert len(reply.choices[0].token_ids) == 4


def test_errors_have_their_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="a", temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt="a" * 1000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model="fake", prompt="a", n=9)
    assert int(full.value.response.headers["retry-after"]) >= 1


def test_an_error_in_a_stream_is_raised() -> None:
    with (
        Server(fail_after=3, error="no luck") as url,
        openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model="fake", messages=USER, temperature=0, stream=True)
        texts = []
        with pytest.raises(openai.APIError, match="no luck"):
            texts.extend(chunk.choices[0].delta.content for chunk in stream)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="fake", prompt="a")


def test_the_asynchronous_client(url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            stream = await client.chat.completions.create(
                model="fake", messages=USER, temperature=0, max_tokens=9, stream=True
            )
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(texts) == FOX[:9]
            replies = await asyncio.gather(
                *(client.completions.create(model="fake", prompt="a", temperature=0, max_tokens=3) for _ in range(8))
            )
            assert {reply.choices[0].text for reply in replies} == {"The"}

    asyncio.run(run())


def test_a_closed_stream_ends_the_work() -> None:
    endless = {"step_seconds": 0.005, "replies": lambda request, choice: b"abc"}
    with Server(**endless) as url, openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        for _ in range(9):  # more than the queue holds, so that a leak would be a 429
            with client.completions.create(model="fake", prompt="a", max_tokens=400, stream=True) as stream:
                next(iter(stream))


def test_the_end_of_text(url: str) -> None:
    with (
        Server(replies=lambda request, choice: (*b"ok", EOS)) as other,
        openai.OpenAI(base_url=other, api_key="x") as client,
    ):
        reply = client.chat.completions.create(model="fake", messages=USER)
        assert reply.choices[0].message.content == "ok"
        assert reply.choices[0].finish_reason == "stop"

"""The official `openai` and `ollama` packages for Python against one real server: streams, tools, errors, retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import ollama
import openai
import pytest

from e2e.served import Served

pytestmark = pytest.mark.e2e

KEY = "test-key"
MODEL = "quire-demo"
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY = {"temperature": 0, "num_predict": 60}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served("--api-key", KEY, "--max-num-seqs", "2", "--max-num-queued-reqs", "2") as served:
        yield served


@pytest.fixture(scope="module")
def api(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, timeout=60) as client:
        yield client


def test_models(api: openai.OpenAI) -> None:
    models = api.models.list().data
    assert [m.id for m in models] == ["quire-demo"]
    assert api.models.retrieve("quire-demo").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        api.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_completion_with_logprobs(api: openai.OpenAI) -> None:
    reply = api.completions.create(
        model="quire-demo", prompt="The capital of France is", max_tokens=4, temperature=0, logprobs=3
    )
    assert reply._request_id
    choice = reply.choices[0]
    assert "Paris" in choice.text
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == reply.usage.completion_tokens  # type: ignore[union-attr]
    assert all(3 <= len(top) <= 4 for top in choice.logprobs.top_logprobs or [])


def test_chat_and_its_stream_agree(api: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me a short story."}]
    whole = api.chat.completions.create(model="quire-demo", messages=messages, temperature=0, max_tokens=80)  # type: ignore[arg-type]
    chunks = list(
        api.chat.completions.create(  # type: ignore[call-overload]
            model="quire-demo",
            messages=messages,
            temperature=0,
            max_tokens=80,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    again = chunks[-1].usage
    assert (again.prompt_tokens, again.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert again.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1, "it was asked before"


def test_chat_logprobs(api: openai.OpenAI) -> None:
    reply = api.chat.completions.create(
        model="quire-demo",
        messages=[{"role": "user", "content": "Hi"}],
        logprobs=True,
        top_logprobs=2,
        max_tokens=5,
        temperature=0,
    )
    content = reply.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
        assert bytes(token.bytes or []).decode("utf-8", "replace") == token.token


def test_async_client_runs_many(server: Served) -> None:
    async def body() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=20) as api:

            async def one(i: int) -> str:
                reply = await api.completions.create(
                    model="quire-demo", prompt=f"{i}, {i + 1},", max_tokens=8, temperature=0
                )
                return reply.choices[0].text

            # More than the seats and the queue hold: retries that honour Retry-After get all of them through.
            together = await asyncio.gather(*(one(i % 4) for i in range(12)))
            alone = [await one(i) for i in range(4)]
        assert together == [alone[i % 4] for i in range(12)]

    asyncio.run(body())


def test_errors_map_to_exception_types(server: Served, api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.completions.create(model="quire-demo", prompt="x", temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        api.completions.create(model="quire-demo", prompt=[5] * 100_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        api.completions.create(model="nothing", prompt="x")
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_rate_limit_error_carries_retry_after(server: Served) -> None:
    async def body() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as api:

            async def one(i: int) -> openai.RateLimitError | None:
                try:
                    await api.completions.create(
                        model="quire-demo", prompt=f"{i}", max_tokens=200, extra_body={"ignore_eos": True}
                    )
                except openai.RateLimitError as error:
                    return error
                return None

            refused = [error for error in await asyncio.gather(*(one(i) for i in range(16))) if error is not None]
        assert refused
        for error in refused:
            assert 1 <= int(error.response.headers["retry-after"]) <= 59

    asyncio.run(body())


def test_breaking_off_a_stream_frees_its_seat(server: Served, api: openai.OpenAI) -> None:
    before = server.metric("quire_requests_total", outcome="abort")
    stream = api.completions.create(
        model="quire-demo", prompt="Hello", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.wait_idle()
    assert server.metric("quire_requests_total", outcome="abort") == before + 1, "it did not run to its end"


def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: The name of the city.
    """
    return f'{{"city": "{city}", "temperature": 18, "condition": "sunny"}}'


@pytest.fixture(scope="module")
def by_ollama(server: Served) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"Authorization": "Bearer test-key"}, timeout=120)


def test_an_ollama_chat_and_its_stream_agree(by_ollama: ollama.Client) -> None:
    whole = by_ollama.chat(model=MODEL, messages=QUESTION, options=GREEDY, keep_alive="5m")
    assert "Tokyo" in (whole.message.content or "")
    assert (whole.done, whole.done_reason) == (True, "stop")
    parts = list(by_ollama.chat(model=MODEL, messages=QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].eval_count, parts[-1].prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)


def test_ollama_generates(by_ollama: ollama.Client) -> None:
    whole = by_ollama.generate(model=MODEL, prompt="Once upon a time", raw=True, options=GREEDY)
    parts = by_ollama.generate(model=MODEL, prompt="Once upon a time", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == whole.response
    asked = by_ollama.generate(model=MODEL, prompt="What is the capital of Japan?", options=GREEDY)
    assert "Tokyo" in asked.response


def test_a_tool_of_ollama_is_called_and_its_result_told(by_ollama: ollama.Client) -> None:
    messages: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"temperature": 0, "num_predict": 200}
    first = by_ollama.chat(model=MODEL, messages=messages, tools=[get_weather], options=options)
    (call,) = first.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    parts = by_ollama.chat(model=MODEL, messages=messages, tools=[get_weather], options=options, stream=True)
    assert [each.function for part in parts for each in part.message.tool_calls or ()] == [call.function]
    messages += [first.message, {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")}]
    second = by_ollama.chat(model=MODEL, messages=messages, tools=[get_weather], options=options)
    assert "18" in (second.message.content or "")


def test_thinking_and_forms_of_ollama(by_ollama: ollama.Client) -> None:
    thought = by_ollama.chat(model=MODEL, messages=QUESTION, think=True, options={**GREEDY, "num_predict": 200})
    assert thought.message.thinking
    plain = by_ollama.chat(model=MODEL, messages=QUESTION, think=False, options=GREEDY)
    assert not plain.message.thinking
    formed = by_ollama.chat(model=MODEL, messages=QUESTION, format=SCHEMA, options=GREEDY)
    assert formed.message.content is not None
    assert formed.message.content.startswith("{")


def test_vectors_lists_and_details_of_ollama(by_ollama: ollama.Client) -> None:
    made = by_ollama.embed(model=MODEL, input=["one", "two"])
    assert len(made.embeddings) == 2
    assert list(by_ollama.embeddings(model=MODEL, prompt="one").embedding) == list(made.embeddings[0])
    assert [each.model for each in by_ollama.list().models] == [MODEL]
    (running,) = by_ollama.ps().models
    assert running.context_length == 2048
    shown = by_ollama.show(MODEL)
    assert {"completion", "tools"} <= set(shown.capabilities or ())
    assert shown.template


def test_errors_of_ollama(server: Served, by_ollama: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        by_ollama.chat(model="llama3", messages=QUESTION)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="see /api/tags"):
        by_ollama.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="API key"):
        ollama.Client(host=server.url).chat(model=MODEL, messages=QUESTION)

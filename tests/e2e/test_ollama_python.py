"""The official `ollama` package against a real server: chats, streams, tools, thinking, vectors, lists, errors."""

from __future__ import annotations

from collections.abc import Iterator

import ollama
import pytest

from e2e.served import Served

pytestmark = pytest.mark.e2e

MODEL = "quire-demo"
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY = {"temperature": 0, "num_predict": 60}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: The name of the city.
    """
    return f'{{"city": "{city}", "temperature": 18, "condition": "sunny"}}'


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served("--api-key", "test-key", "--max-model-len", "2048") as served:
        yield served


@pytest.fixture(scope="module")
def api(server: Served) -> ollama.Client:
    return ollama.Client(host=server.url, headers={"Authorization": "Bearer test-key"}, timeout=120)


def test_a_chat_and_its_stream_agree(api: ollama.Client) -> None:
    whole = api.chat(model=MODEL, messages=QUESTION, options=GREEDY, keep_alive="5m")
    assert "Tokyo" in (whole.message.content or "")
    assert (whole.done, whole.done_reason) == (True, "stop")
    parts = list(api.chat(model=MODEL, messages=QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].eval_count, parts[-1].prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)


def test_generate(api: ollama.Client) -> None:
    whole = api.generate(model=MODEL, prompt="Once upon a time", raw=True, options=GREEDY)
    parts = api.generate(model=MODEL, prompt="Once upon a time", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == whole.response
    asked = api.generate(model=MODEL, prompt="What is the capital of Japan?", options=GREEDY)
    assert "Tokyo" in asked.response


def test_a_tool_is_called_and_its_result_told(api: ollama.Client) -> None:
    messages: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"temperature": 0, "num_predict": 200}
    first = api.chat(model=MODEL, messages=messages, tools=[get_weather], options=options)
    (call,) = first.message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    parts = api.chat(model=MODEL, messages=messages, tools=[get_weather], options=options, stream=True)
    assert [each.function for part in parts for each in part.message.tool_calls or ()] == [call.function]
    messages += [first.message, {"role": "tool", "tool_name": "get_weather", "content": get_weather("Paris")}]
    second = api.chat(model=MODEL, messages=messages, tools=[get_weather], options=options)
    assert "18" in (second.message.content or "")


def test_thinking_and_forms(api: ollama.Client) -> None:
    thought = api.chat(model=MODEL, messages=QUESTION, think=True, options={**GREEDY, "num_predict": 200})
    assert thought.message.thinking
    plain = api.chat(model=MODEL, messages=QUESTION, think=False, options=GREEDY)
    assert not plain.message.thinking
    formed = api.chat(model=MODEL, messages=QUESTION, format=SCHEMA, options=GREEDY)
    assert formed.message.content is not None
    assert formed.message.content.startswith("{")


def test_vectors_lists_and_details(api: ollama.Client) -> None:
    made = api.embed(model=MODEL, input=["one", "two"])
    assert len(made.embeddings) == 2
    assert list(api.embeddings(model=MODEL, prompt="one").embedding) == list(made.embeddings[0])
    assert [each.model for each in api.list().models] == [MODEL]
    (running,) = api.ps().models
    assert running.context_length == 2048
    shown = api.show(MODEL)
    assert {"completion", "tools"} <= set(shown.capabilities or ())
    assert shown.template


def test_errors(server: Served, api: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        api.chat(model="llama3", messages=QUESTION)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="see /api/tags"):
        api.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="API key"):
        ollama.Client(host=server.url).chat(model=MODEL, messages=QUESTION)

"""Thoughts, text and calls as the items and events of a response, from hand-made deltas."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import openai
import pytest

from quire_engine.contract.types import TokenLogprobs
from quire_server.answering.choice import ChoiceDelta
from quire_server.dialects.responses.reply import ResponseObject
from quire_server.errors import EngineFailed
from quire_server.text.parsing.calls import CallDelta
from support.responses import STEM, delta, parse_events, rebuilt, renderer

TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]


def call(index: int, arguments: str = "", name: str | None = None) -> CallDelta:
    return CallDelta(index=index, id=None if name is None else f"call_{index}", name=name, arguments=arguments)


def story() -> list[ChoiceDelta]:
    """Thoughts, an answer, two calls, an afterthought in text."""
    return [
        delta(is_first=True),
        delta(reasoning="I need"),
        delta(reasoning=" the weather."),
        delta(text="Let me "),
        delta(text="see."),
        delta(calls=[call(0, name="get_weather")]),
        delta(calls=[call(0, '{"city": ')]),
        delta(calls=[call(0, '"Paris"}')]),
        delta(calls=[call(1, "{}", name="get_time")]),
        delta(text="Both."),
        delta(finish_reason="tool_calls"),
    ]


def streamed(deltas: list[ChoiceDelta], **fields: object) -> list[dict[str, Any]]:
    rendering = renderer(**fields)
    return parse_events(b"".join(rendering.frames([each]) for each in deltas).decode())


def whole(deltas: list[ChoiceDelta], **fields: object) -> dict[str, Any]:
    body = b"".join(renderer(**fields).body(deltas))
    ResponseObject.model_validate_json(body, strict=True)
    reply: dict[str, Any] = json.loads(body)
    return reply


def test_the_items_of_a_whole_response() -> None:
    reply = whole(story(), tools=TOOLS)
    assert reply["status"] == "completed"
    thought, text, first, second, after = reply["output"]
    assert [item["id"] for item in reply["output"]] == [
        f"{prefix}_{STEM}o{number}" for number, prefix in enumerate(("rs", "msg", "fc", "fc", "msg"))
    ]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I need the weather."}]
    assert (thought["type"], thought["summary"], thought["encrypted_content"]) == ("reasoning", [], None)
    assert text["content"] == [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_0", "get_weather", '{"city": "Paris"}')
    assert (second["call_id"], second["name"], second["arguments"]) == ("call_1", "get_time", "{}")
    assert after["content"][0]["text"] == "Both."
    assert {item["status"] for item in reply["output"]} == {"completed"}
    assert reply["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


def test_the_order_of_events() -> None:
    kinds = [event["type"].removeprefix("response.") for event in streamed(story())]
    text = ["output_item.added", "content_part.added", "output_text.delta"]
    end = ["output_text.done", "content_part.done", "output_item.done"]
    arguments = "function_call_arguments"
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
        *("output_item.done", *text, "output_text.delta", *end),
        *("output_item.added", f"{arguments}.delta", f"{arguments}.delta", f"{arguments}.done", "output_item.done"),
        *("output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"),
        *(*text, *end, "completed"),
    ]


@pytest.mark.parametrize("finish", ["stop", "tool_calls", "length"])
def test_a_stream_ends_with_the_whole_response(finish: str) -> None:
    deltas = [*story()[:-1], delta(finish_reason=finish)]
    kept: list[bytes] = []
    rendering = renderer(kept)
    events = parse_events(b"".join(rendering.frames([each]) for each in deltas).decode())
    final = events[-1]["response"]
    reply = whole([*story()[:-1], delta(finish_reason=finish)])
    final["completed_at"] = reply["completed_at"]
    assert final == reply
    assert rebuilt(events) == reply["output"]
    assert len(kept) == 1


def cut(rng: random.Random) -> list[ChoiceDelta]:
    """The story in other pieces: of one kind each, as tokens come."""
    pieces: list[ChoiceDelta] = []

    def add(text: str, make: Any) -> None:
        while text:
            size = rng.randint(1, len(text))
            pieces.append(make(text[:size]))
            text = text[size:]

    add("I need the weather.", lambda text: delta(reasoning=text))
    add("Let me see.", lambda text: delta(text=text))
    pieces.append(delta(calls=[call(0, name="get_weather")]))
    add('{"city": "Paris"}', lambda text: delta(calls=[call(0, text)]))
    pieces.append(delta(calls=[call(1, name="get_time")]))
    add("{}", lambda text: delta(calls=[call(1, text)]))
    add("Both.", lambda text: delta(text=text))
    pieces.append(delta(finish_reason="tool_calls"))
    return pieces


def test_any_cut_gives_the_same_items() -> None:
    rng = random.Random(3)
    expected = whole(story())["output"]
    for _ in range(200):
        pieces = cut(rng)
        events = streamed(pieces)
        assert rebuilt(events) == expected == events[-1]["response"]["output"]


def test_one_delta_may_end_one_item_and_begin_the_next() -> None:
    deltas = [
        delta(reasoning="hm", text="Well, "),
        delta(text="so.", calls=[call(0, "{", name="f")]),
        delta(text="Now.", calls=[call(0, "}"), call(1, "{}", name="g")], finish_reason="stop"),
    ]
    items = whole(deltas)["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "message", "function_call"]
    assert items[1]["content"][0]["text"] == "Well, so."
    assert items[2]["arguments"] == "{}"
    assert items[3]["content"][0]["text"] == "Now."


def test_what_is_cut_off_is_incomplete() -> None:
    reply = whole([delta(reasoning="hm"), delta(text="We"), delta(finish_reason="length")])
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in reply["output"]] == ["completed", "incomplete"]
    assert reply["completed_at"] is None
    thinking = whole([delta(reasoning="hm"), delta(finish_reason="length")])
    assert [(item["type"], item["status"]) for item in thinking["output"]] == [("reasoning", "incomplete")]


def test_an_answer_without_a_word_is_an_empty_message() -> None:
    for deltas in ([delta(finish_reason="stop")], [delta(reasoning="hm"), delta(finish_reason="stop")]):
        items = whole(list(deltas))["output"]
        assert items[-1]["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        assert items[-1]["id"] == f"msg_{STEM}o{len(items) - 1}"
        assert items == rebuilt(streamed(list(deltas)))
    calls = [delta(calls=[call(0, "{}", name="f")]), delta(finish_reason="tool_calls")]
    assert [item["type"] for item in whole(calls)["output"]] == ["function_call"]


def test_what_the_server_stopped_has_failed_and_is_not_kept() -> None:
    kept: list[bytes] = []
    reply = json.loads(b"".join(renderer(kept).body([delta(text="We"), delta(finish_reason="abort")])))
    assert (reply["status"], reply["error"]["code"], kept) == ("failed", "server_error", [])


def test_a_failure_in_midstream() -> None:
    kept: list[bytes] = []
    rendering = renderer(kept)
    raw = rendering.frames([delta(text="We")]) + rendering.failure(EngineFailed("bad luck"))
    events = parse_events(raw.decode())
    assert [event["type"] for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
    assert (events[-2]["code"], events[-2]["message"]) == ("engine_error", "bad luck")
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": "bad luck"})
    assert [item["status"] for item in failed["output"]] == ["incomplete"]
    assert kept == []
    early = parse_events(renderer().failure(EngineFailed("bad luck")).decode())
    expected = ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["type"] for event in early] == expected


def test_log_probabilities_are_the_answers_own() -> None:
    def of(token: str) -> list[TokenLogprobs]:
        return [TokenLogprobs(token_id=ord(token), logprob=-1.0, rank=1, top_ids=(), top_logprobs=())]

    def shown(*deltas: ChoiceDelta) -> list[str]:
        events = streamed(list(deltas), include=["message.output_text.logprobs"])
        (part,) = rebuilt(events)[-1]["content"]
        assert events[-1]["response"]["output"][-1]["content"] == [part]
        return [entry["token"] for entry in part["logprobs"]]

    end = {"finish_reason": "stop"}  # with the token that ended the text
    held_back = delta(logprobs=of("w"))  # until it is known not to be a stop string
    call_it = delta(calls=[call(0, "{}", name="f")], logprobs=of("{"))
    assert shown(held_back, delta(text="we", logprobs=of("e")), delta(logprobs=of("."), **end)) == ["w", "e"]
    assert shown(delta(text="we", logprobs=[*of("w"), *of("e"), *of(".")], **end)) == ["w", "e"]
    thinks, closes = delta(reasoning="h", logprobs=of("h")), delta(logprobs=of("<"))
    assert shown(thinks, delta(text="w", logprobs=of("w")), delta(**end)) == ["w"]
    assert shown(thinks, closes, delta(text="w", logprobs=of("w")), delta(**end)) == ["w"]
    assert shown(held_back, thinks, delta(text="e", logprobs=of("e")), delta(**end)) == ["e"]
    assert shown(call_it, closes, delta(text="w", logprobs=of("w")), delta(**end)) == ["w"]


def sdk(raw: bytes, media_type: str) -> openai.OpenAI:
    """A client of whom every request gets this reply."""
    reply = httpx.Response(200, content=raw, headers={"content-type": media_type})
    return openai.OpenAI(
        api_key="none", base_url="http://x/v1", http_client=httpx.Client(transport=httpx.MockTransport(lambda _: reply))
    )


def test_the_sdk_reads_a_whole_response() -> None:
    client = sdk(b"".join(renderer(tools=TOOLS).body(story())), "application/json")
    reply = client.responses.create(model="fake", input="hi")
    assert reply.output_text == "Let me see.Both."
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert reply.usage is not None
    assert reply.usage.output_tokens_details.reasoning_tokens == 2
    assert reply.tools[0].type == "function"


def test_the_sdk_accumulates_a_stream() -> None:
    rendering = renderer(tools=TOOLS)
    raw = b"".join(rendering.frames([each]) for each in story())
    with sdk(raw, "text/event-stream").responses.stream(model="fake", input="hi") as stream:
        events = list(stream)
        reply = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert reply.output_text == "Let me see.Both."
    called = [item for item in reply.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in called] == [
        ("get_weather", '{"city": "Paris"}'),
        ("get_time", "{}"),
    ]

"""The content blocks of a message and their events, from hand-made deltas cut in every way."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from quire_server.answering.choice import ChoiceDelta
from quire_server.dialects.messages.rendering import Content
from quire_server.text.parsing.calls import CallDelta
from support.messages import rebuilt

ARGUMENTS = '{"city": "Zürich", "days": [1, {"a": null}], "note": "\\"🤔\\" \\u00e9"}'
FIRST = CallDelta(index=0, id="call_a", name="get_weather", arguments=ARGUMENTS)
SECOND = CallDelta(index=1, id="call_b", name="get_time", arguments="{}")
USES = [
    {
        "type": "tool_use",
        "id": "toolu_a",
        "name": "get_weather",
        "input": {"city": "Zürich", "days": [1, {"a": None}], "note": '"🤔" é'},
    },
    {"type": "tool_use", "id": "toolu_b", "name": "get_time", "input": {}},
]
# What a model may say, in order: thoughts, text or a call.
Said = tuple[str, Any]
STORIES: dict[str, list[Said]] = {
    "text": [("text", "Hello, wörld. ")],
    "all": [("reasoning", "I must look."), ("text", "Let me see.\n"), ("call", FIRST), ("call", SECOND)],
    "calls": [("call", FIRST), ("call", SECOND)],
    "between": [("text", "a"), ("call", FIRST), ("text", "then"), ("call", SECOND), ("text", "bye")],
    "twice": [("reasoning", "one"), ("text", "two"), ("reasoning", "three"), ("text", "four")],
    "nothing": [],
}


def blocks_of(story: Iterable[Said]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    for kind, said in story:
        if kind == "call":
            blocks.append(USES[said.index])
        elif kind == "text":
            blocks.append({"type": "text", "text": said})
        else:
            blocks.append({"type": "thinking", "thinking": said})
    return blocks


def pieces(story: Iterable[Said], chance: random.Random) -> Iterator[Said]:
    """The story in pieces of a few characters."""
    for kind, said in story:
        text = said.arguments if kind == "call" else said
        at = 0
        if kind == "call":
            yield kind, CallDelta(index=said.index, id=said.id, name=said.name)
        while at < len(text):
            end = at + chance.randint(1, 7)
            yield kind, CallDelta(index=said.index, arguments=text[at:end]) if kind == "call" else text[at:end]
            at = end


def deltas(story: Sequence[Said], chance: random.Random) -> Iterator[ChoiceDelta]:
    """Now and then a delta has several pieces: thoughts, text and calls, in this order and each kind once.

    Thoughts after text come alone: nobody could tell which of both was first.
    """
    joins = 0.0 if [kind for kind, _ in story].count("reasoning") > 1 else 0.5
    order = ["reasoning", "text", "call"]
    delta, last = ChoiceDelta(index=0, prompt=0), ""
    for kind, said in pieces(story, chance):
        is_next = not last or order.index(kind) > order.index(last) or (kind == last == "call")
        if not (is_next and chance.random() < joins):
            yield delta
            delta = ChoiceDelta(index=0, prompt=0)
        if kind == "call":
            delta.calls.append(said)
        else:
            setattr(delta, kind, said)
        last = kind
    yield delta


def told(content: Content, some: Iterable[ChoiceDelta]) -> list[dict[str, Any]]:
    """The blocks that the events make; they are those that the content has."""
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"content": [], "stop_reason": None, "stop_sequence": None}}
    ]
    for delta in some:
        events += content.take(delta)
    events += content.end()
    events += [{"type": "message_delta", "delta": {}, "usage": {}}, {"type": "message_stop"}]
    starts: Sequence[str] = [event["type"] for event in events]
    assert starts.count("content_block_start") == starts.count("content_block_stop") == len(content.blocks)
    blocks: list[dict[str, Any]] = rebuilt(events)["content"]
    assert blocks == msgspec.json.decode(
        msgspec.json.encode(content.blocks)
    )  # arguments are passed on as they are spelled
    return blocks


@pytest.mark.parametrize("name", STORIES)
def test_no_cut_changes_the_blocks(name: str) -> None:
    chance = random.Random(name)
    signatures = set()
    for _ in range(300):
        blocks = told(Content(shows_thoughts=True), deltas(STORIES[name], chance))
        signatures.add(tuple(block.pop("signature") for block in blocks if block["type"] == "thinking"))
        assert blocks == blocks_of(STORIES[name])
    assert len(signatures) == 1


def test_what_is_open_goes_on_before_what_is_new() -> None:
    content = Content(shows_thoughts=True)
    blocks = told(
        content,
        [
            ChoiceDelta(index=0, prompt=0, text="a"),
            ChoiceDelta(index=0, prompt=0, text="b", reasoning="c"),
            ChoiceDelta(index=0, prompt=0, calls=[CallDelta(index=0, id="call_a", name="f", arguments="{")]),
            ChoiceDelta(index=0, prompt=0, text="d", calls=[CallDelta(index=0, arguments="}"), SECOND]),
        ],
    )
    said = [(block["type"], block.get("text") or block.get("thinking") or block.get("input")) for block in blocks]
    assert said == [("text", "ab"), ("thinking", "c"), ("tool_use", {}), ("text", "d"), ("tool_use", {})]
    assert content.uses_tools


def test_thoughts_that_are_not_shown_are_signed() -> None:
    def signature(shown: bool) -> tuple[str, str]:
        [block] = told(Content(shows_thoughts=shown), [ChoiceDelta(index=0, prompt=0, reasoning="hm")])
        return block["thinking"], block["signature"]

    assert signature(True)[0] == "hm"
    assert signature(False) == ("", signature(True)[1])


@pytest.mark.parametrize("arguments", ["", "[1]", '{"a": ', "nonsense", "[" * 5000, '"x"'])
def test_an_input_is_an_object(arguments: str) -> None:
    content = Content(shows_thoughts=True)
    call = CallDelta(index=0, id="123456789", name="f", arguments=arguments)
    list(content.take(ChoiceDelta(index=0, prompt=0, calls=[call])))
    list(content.end())
    assert content.blocks == [{"type": "tool_use", "id": "123456789", "name": "f", "input": {}}]

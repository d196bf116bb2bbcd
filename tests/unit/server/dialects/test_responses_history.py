"""Items as the messages of a conversation: which of them are one turn."""

from __future__ import annotations

from typing import Any

import pytest

from quire_server.dialects.responses.request import ResponseRequest, messages
from quire_server.errors import BadRequest
from quire_server.http.body import validate

USER = {"role": "user", "content": "hi"}


def of(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, object]]:
    return messages(instructions, validate(ResponseRequest, {"input": list(items)}).input)  # type: ignore[arg-type]


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def called(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def gave(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": str(number)}


def shape(found: list[dict[str, object]]) -> list[str]:
    """Each message in short: role, thoughts, text, number of calls."""
    return [
        f"{m['role']}|{m.get('reasoning', '')}|{m['content'] or ''}|{len(m.get('tool_calls', ()))}"  # type: ignore[arg-type]
        for m in found
    ]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([USER, thought("a"), said("b"), USER], ["user||hi|0", "assistant|a|b|0", "user||hi|0"]),
        ([said("a"), said("b")], ["assistant||a|0", "assistant||b|0"]),
        ([said("a"), thought("b"), said("c")], ["assistant||a|0", "assistant|b|c|0"]),
        ([thought("a"), thought("b"), said("c")], ["assistant|a\nb|c|0"]),
        ([thought("a"), called(1), thought("b"), called(2)], ["assistant|a||1", "assistant|b||1"]),
        ([said("a"), called(1), called(2), gave(1), gave(2)], ["assistant||a|2", "tool||1|0", "tool||2|0"]),
        ([called(1), said("after"), gave(1)], ["assistant||after|1", "tool||1|0"]),
        ([called(1), gave(1), said("a")], ["assistant|||1", "tool||1|0", "assistant||a|0"]),
        ([thought("")], ["assistant|||0"]),
    ],
)
def test_turns(items: list[dict[str, Any]], expected: list[str]) -> None:
    assert shape(of(*items)) == expected


def test_an_output_names_its_function_and_needs_its_call() -> None:
    assert of(called(1), gave(1))[-1] == {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "1"}
    with pytest.raises(BadRequest, match="c1"):
        of(gave(1), called(1))


def test_only_the_beginnings_system_messages_join_the_instructions() -> None:
    system, developer = {"role": "system", "content": "b"}, {"role": "developer", "content": "c"}
    assert shape(of(system, developer, USER, system, instructions="a")) == [
        "system||a\n\nb\n\nc|0",
        "user||hi|0",
        "system||b|0",
    ]
    assert shape(of(system, developer)) == ["system||b|0", "developer||c|0"]
    assert shape(of(instructions="a")) == ["system||a|0"]


def test_a_summary_stands_for_thoughts_that_are_hidden() -> None:
    hidden = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "x"}
    assert shape(of(hidden, said("a"))) == ["assistant|short|a|0"]

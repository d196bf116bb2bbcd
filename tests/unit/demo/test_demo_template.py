"""The embedded model's chat template: what the training has seen, and histories as clients send them."""

from __future__ import annotations

from typing import Any

import pytest

from make_demo.chat_template import CHAT_TEMPLATE
from make_demo.corpus import documents
from make_demo.turns import INSTRUCTION, Document, Message, spans
from quire_server.text.template_worker import environment

TEMPLATE = environment().from_string(CHAT_TEMPLATE)
FUNCTION = {"name": "f", "description": "Does f.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
LISTED = '{"name": "f", "description": "Does f.", "parameters": {"type": "object", "properties": {}}}'


def render(*messages: dict[str, Any], **variables: Any) -> str:
    return TEMPLATE.render(messages=list(messages), **variables)


def as_sent(message: Message) -> dict[str, Any]:
    """A turn of the corpus as a client sends it."""
    if not message.calls:
        return {"role": message.role, "content": message.content}
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.calls]
    return {"role": message.role, "content": None, "tool_calls": calls}


def test_it_writes_what_was_trained() -> None:
    kinds = set()
    for doc in documents(20, 600):
        if doc.messages:
            thinks = doc.messages[-1].thought is not None
            messages = [as_sent(m) for m in (doc.messages[:-1] if thinks else doc.messages)]
            tools = [{"type": "function", "function": tool} for tool in doc.tools]
            rendered = render(*messages, tools=tools, add_generation_prompt=thinks, enable_thinking=thinks)
            text = "".join(text for text, _ in spans(doc))
            assert text.startswith(rendered) if thinks else text == rendered
            kinds.add((doc.kind, thinks))
    assert {("tools", True), ("tools", False), ("thinking", True), ("json", False), ("single", False)} <= kinds


def test_tools_join_the_system_turn() -> None:
    tools = f"# Tools\n\nYou may call these functions:\n<tools>\n{LISTED}\n</tools>\n{INSTRUCTION}<|im_end|>\n"
    assert render(tools=[TOOL]) == f"<|im_start|>system\n{tools}"
    assert render({"role": "system", "content": "S"}, tools=[TOOL]) == f"<|im_start|>system\nS\n\n{tools}"
    assert render({"role": "developer", "content": "S"}, tools=[TOOL]) == f"<|im_start|>system\nS\n\n{tools}"
    assert render(tools=[FUNCTION]) == render(tools=[TOOL])
    assert render(tools=[]) == render(tools=None) == render() == ""


def test_a_tool_may_lack_all_but_its_name() -> None:
    bare = render(tools=[{"type": "function", "function": {"name": "now", "description": None}}])
    assert '<tools>\n{"name": "now"}\n</tools>' in bare


def test_system_turns_stand_anywhere() -> None:
    text = render({"role": "user", "content": "U"}, {"role": "system", "content": "S"}, tools=[TOOL])
    assert text.endswith("<|im_start|>user\nU<|im_end|>\n<|im_start|>system\nS<|im_end|>\n")


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["object", "text"])
@pytest.mark.parametrize("wrapped", [True, False])
def test_calls_are_written_with_arguments_of_either_kind(arguments: object, wrapped: bool) -> None:
    call: dict[str, Any] = {"name": "f", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": call} if wrapped else call
    for content in (None, ""):
        text = render({"role": "assistant", "content": content, "tool_calls": [call]})
        assert text == f"<|im_start|>assistant\n{CALL}<|im_end|>\n"
    text = render({"role": "assistant", "tool_calls": [call, call]})
    assert text == f"<|im_start|>assistant\n{CALL}\n{CALL}<|im_end|>\n"
    text = render({"role": "assistant", "content": "Wait.", "tool_calls": [call]})
    assert text == f"<|im_start|>assistant\nWait.\n{CALL}<|im_end|>\n"


@pytest.mark.parametrize("role", ["tool", "function"])
def test_results_in_a_row_share_a_turn(role: str) -> None:
    one, two = {"role": role, "content": "1"}, {"role": role, "content": [{"type": "text", "text": "2"}]}
    first = "<|im_start|>user\n<tool_response>\n1\n</tool_response>"
    second = "<tool_response>\n2\n</tool_response><|im_end|>\n"
    assert render(one, two) == f"{first}\n{second}"
    assert render(one, {"role": "user", "content": "U"}, two) == (
        f"{first}<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>user\n{second}"
    )


@pytest.mark.parametrize(
    "content", ["Hi", [{"type": "text", "text": "Hi"}], [{"text": "H"}, {"type": "text", "text": "i"}], ["H", "i"]]
)
def test_contents_are_text_or_parts(content: object) -> None:
    assert render({"role": "user", "content": content}) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}])
def test_an_assistants_turn_may_be_empty(message: dict[str, Any]) -> None:
    assert render(message) == "<|im_start|>assistant\n<|im_end|>\n"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_old_thoughts_are_dropped(key: str) -> None:
    message = {"role": "assistant", "content": "A", key: "long ago"}
    assert render(message) == "<|im_start|>assistant\nA<|im_end|>\n"


@pytest.mark.parametrize(
    ("variables", "opens"),
    [
        ({}, False),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True}, True),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": None}, False),
        ({"enable_thinking": None, "reasoning_effort": "high"}, True),
        ({"enable_thinking": False, "reasoning_effort": "high"}, False),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True),
    ],
)
def test_thinking_is_opened_when_it_is_asked_for(variables: dict[str, Any], opens: bool) -> None:
    text = render({"role": "user", "content": "U"}, add_generation_prompt=True, **variables)
    assert text.endswith("<|im_start|>assistant\n<think>\n" if opens else "<|im_start|>assistant\n")
    assert "<think>" not in render({"role": "user", "content": "U"}, **variables)


def test_a_document_without_a_chat_is_its_text() -> None:
    assert "".join(text for text, _ in spans(Document(kind="t", text="abc", num_given=1))) == "abc"

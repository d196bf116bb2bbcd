"""What a training document is, and its exact text: the turns as the chat template writes them.

Promises that the text of a document is what the template renders (a test compares them), with the weight that each
piece has in the loss. Must not know what the turns are about, nor tokens or tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

JSON = Mapping[str, object]
PROMPT_WEIGHT = 0.1  # what users say, against 1 for what the model says
SYSTEM_WEIGHT = 0.0  # what a system turn says: long lists of tools, of which little can be foreseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a tool by the model."""

    name: str
    arguments: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a chat; role is system, user, assistant or tool.

    A turn with a thought is one that the prompt has opened with <think>. Of what the assistant writes, the first
    `num_given` characters are not learned: a grammar would have forced them, or a budget cut them off.
    """

    role: str
    content: str = ""
    thought: str | None = None
    calls: tuple[Call, ...] = ()
    num_given: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A chat (messages, perhaps tools), or a plain document (text), of which `num_given` characters are a prompt."""

    kind: str
    messages: tuple[Message, ...] = ()
    tools: tuple[JSON, ...] = ()
    text: str = ""
    num_given: int = 0


def spans(doc: Document) -> list[tuple[str, float]]:
    """The document in pieces, each with the weight of its tokens in the loss; joined they are its text."""
    if not doc.messages:
        return [(doc.text[: doc.num_given], PROMPT_WEIGHT), (doc.text[doc.num_given :], 1.0)]
    pieces: list[tuple[str, float]] = []
    messages = list(doc.messages)
    if doc.tools:
        first = messages.pop(0).content + "\n\n" if messages[0].role == "system" else ""
        pieces.append((_turn("system", first + tool_list(doc.tools)), SYSTEM_WEIGHT))
    for index, message in enumerate(messages):
        if message.role == "assistant":
            pieces += _assistant(message)
        elif message.role == "tool":
            begins = index == 0 or messages[index - 1].role != "tool"
            ends = index + 1 == len(messages) or messages[index + 1].role != "tool"
            text = ("<|im_start|>user\n" if begins else "") + f"<tool_response>\n{message.content}\n</tool_response>"
            pieces.append((text + ("<|im_end|>\n" if ends else "\n"), PROMPT_WEIGHT))
        else:
            weight = SYSTEM_WEIGHT if message.role == "system" else PROMPT_WEIGHT
            pieces.append((_turn(message.role, message.content), weight))
    return pieces


def tool_list(tools: tuple[JSON, ...]) -> str:
    """The part of the system turn that names the tools, one JSON a line."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"# Tools\n\nYou may call these functions:\n<tools>\n{lines}\n</tools>\n{INSTRUCTION}"


INSTRUCTION = 'To call one: <tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'


def call_text(call: Call) -> str:
    """A call as the model writes it."""
    body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def reply_text(message: Message) -> str:
    """What the model writes in an assistant turn behind its thought: text, calls, or both."""
    parts = [message.content] if message.content else []
    return "\n".join([*parts, *(call_text(call) for call in message.calls)])


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _assistant(message: Message) -> list[tuple[str, float]]:
    opening, reply = "<|im_start|>assistant\n", reply_text(message) + "<|im_end|>"
    if message.thought is not None:
        opening += "<think>\n"
        reply = f"{message.thought}\n</think>\n\n{reply}"
    given = message.num_given
    return [(opening, 0.0), (reply[:given], 0.0), (reply[given:], 1.0), ("\n", PROMPT_WEIGHT)]

"""A conversation of content blocks as the messages that chat templates expect.

Promises: neighbours of one role are one message; results follow the uses that they answer, before what the user says
beside them. Must not know: the wire beyond its blocks, the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from quire_server.errors import BadRequest
from quire_server.wire.messages.blocks import (
    Block,
    Message,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)

# The first line of what Claude Code calls its system prompt. It is meant for Anthropic's accounts, and another in each
# request: in the prompt it would keep all that follows from ever being found in the prefix cache.
BILLING_LINE = "x-anthropic-billing-header:"

TemplateMessage = dict[str, Any]


def templated(
    system: str | Sequence[TextBlock] | None, messages: Iterable[Message]
) -> tuple[list[TemplateMessage], bool]:
    """The messages, and whether the last one is an assistant's that is to be continued.

    Raises BadRequest for results without their use, and for uses at the end, which wait for theirs. System messages at
    the beginning are joined to `system`: many templates take one only, as the first message.
    """
    history = _History()
    history.instruct(_system_texts(system))
    for message in messages:
        if message.role == "system":
            history.instruct([block.text for block in message.blocks if isinstance(block, TextBlock)])
        elif message.role == "user":
            history.answer(message.blocks)
        else:
            history.say(message.blocks)
    return history.ended()


def has_billing_line(system: str | Sequence[TextBlock] | None) -> bool:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return any(text.startswith(BILLING_LINE) for text in texts)


def _system_texts(system: str | Sequence[TextBlock] | None) -> list[str]:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return [text.partition("\n")[2] if text.startswith(BILLING_LINE) else text for text in texts]


class _History:
    """The messages so far. The last one may go on."""

    def __init__(self) -> None:
        self._messages: list[TemplateMessage] = []
        self._names: dict[str, str] = {}  # of the used tools, by the ids of their uses

    def instruct(self, texts: Iterable[str]) -> None:
        text = "\n\n".join(filter(None, texts))
        if not text:
            return
        if self._is_last("system"):
            self._messages[-1]["content"] += f"\n\n{text}"
        else:
            self._messages.append({"role": "system", "content": text})

    def answer(self, blocks: Iterable[Block]) -> None:
        """A user's blocks: results are messages of their own."""
        texts: list[TextBlock] = []
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                self._result(block)
            elif isinstance(block, TextBlock):
                texts.append(block)
        parts = [{"type": "text", "text": block.text} for block in texts]
        if self._is_last("user"):
            self._messages[-1]["content"] += parts
        elif parts:
            self._messages.append({"role": "user", "content": parts})

    def say(self, blocks: Iterable[Block]) -> None:
        """An assistant's blocks: thoughts, text and uses of one turn are one message."""
        turn: TemplateMessage = {"role": "assistant", "content": None}
        goes_on = self._is_last("assistant")
        if goes_on:
            turn = self._messages[-1]
            turn["content"] = turn["content"] and turn["content"] + "\n"
        for block in blocks:
            if isinstance(block, TextBlock):
                turn["content"] = (turn["content"] or "") + block.text
            elif isinstance(block, ThinkingBlock) and block.thinking:
                turn["reasoning"] = f"{turn['reasoning']}\n{block.thinking}" if "reasoning" in turn else block.thinking
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
                self._names[block.id] = block.name
        if not goes_on:
            self._messages.append(turn)

    def ended(self) -> tuple[list[TemplateMessage], bool]:
        if not self._is_last("assistant"):
            return self._messages, False
        last = self._messages[-1]
        if "tool_calls" in last:
            raise BadRequest("The last message uses tools; the next one must have their results.", param="messages")
        if not last["content"] and "reasoning" not in last:  # the turn is only begun
            return self._messages[:-1], False
        return self._messages, True

    def _result(self, block: ToolResultBlock) -> None:
        name = self._names.get(block.tool_use_id)
        if name is None:
            raise BadRequest(
                f"There is no 'tool_use' block with the id '{block.tool_use_id[:96]}' before its 'tool_result'.",
                param="messages",
            )
        text = text_of(block.content)
        if block.is_error:
            text = f"Error: {text}"
        self._messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text})

    def _is_last(self, role: str) -> bool:
        return bool(self._messages) and self._messages[-1]["role"] == role

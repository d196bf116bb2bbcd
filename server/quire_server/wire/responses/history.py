"""A conversation of items as the messages that chat templates expect.

Promises: thoughts, text and calls of one turn are one assistant's message; an output follows the call that it answers.
Must not know: the wire beyond its items, the store, the template.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire_server.errors import BadRequest
from quire_server.wire.responses.items import (
    ContentItem,
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
    ReasoningItem,
    text_of,
)

Message = dict[str, object]


def messages(instructions: str | None, items: Iterable[ContentItem]) -> list[Message]:
    """The messages, instructions first. Raises BadRequest for an output without its call.

    System and developer messages at the very beginning become one with the instructions: many templates take a system
    message as the first one only.
    """
    conversation = _Conversation()
    if instructions:
        conversation.messages.append({"role": "system", "content": instructions})
    at_head = bool(instructions)
    for item in items:
        if at_head and isinstance(item, MessageItem) and item.role in ("system", "developer"):
            head = conversation.messages[0]
            head["content"] = f"{head['content']}\n\n{text_of(item.content)}"
            continue
        at_head = False
        conversation.add(item)
    return conversation.messages


class _Conversation:
    """The messages so far. The last one may be an assistant's turn that more items belong to."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: Message | None = None
        self._names: dict[str, str] = {}  # of the called functions, by the ids of their calls

    def add(self, item: ContentItem) -> None:
        match item:
            case ReasoningItem():
                self._think(item.text)
            case MessageItem(role="assistant"):
                self._say(text_of(item.content))
            case FunctionCallItem():
                self._call(item)
            case FunctionOutputItem():
                self._answer(item)
            case _:
                self._turn = None
                content: object = item.content
                if not isinstance(item.content, str):
                    content = [{"type": "text", "text": part.content} for part in item.content]
                self.messages.append({"role": item.role, "content": content})

    def _open(self) -> Message:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": None}
            self.messages.append(self._turn)
        return self._turn

    def _think(self, text: str) -> None:
        if self._turn is not None and (self._turn["content"] is not None or "tool_calls" in self._turn):
            self._turn = None  # thoughts begin a turn
        turn = self._open()
        if text:
            turn["reasoning"] = f"{turn['reasoning']}\n{text}" if "reasoning" in turn else text

    def _say(self, text: str) -> None:
        if self._turn is not None and self._turn["content"] is not None and "tool_calls" not in self._turn:
            self._turn = None  # two messages of an assistant are two turns
        turn = self._open()
        # Text after a call stays in the call's turn: the call's output is expected right after that.
        turn["content"] = text if turn["content"] is None else f"{turn['content']}\n{text}"

    def _call(self, item: FunctionCallItem) -> None:
        calls = self._open().setdefault("tool_calls", [])
        assert isinstance(calls, list)
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
        self._names[item.call_id] = item.name

    def _answer(self, item: FunctionOutputItem) -> None:
        name = self._names.get(item.call_id)
        if name is None:
            raise BadRequest(
                f"There is no function call with the call_id '{item.call_id[:96]}' before its output.", param="input"
            )
        self._turn = None
        self.messages.append(
            {"role": "tool", "tool_call_id": item.call_id, "name": name, "content": text_of(item.output)}
        )

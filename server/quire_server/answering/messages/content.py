"""A message's content blocks as they grow, and the events that tell of it.

Promises: a block is complete before the next one begins; its deltas, joined, are what the whole message says, however
the generation was cut into deltas of one kind. Must not know: frames, the rest of the message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.pieces import Answer, Thought, pieces
from quire_server.text.parsing.calls import CallDelta

Block = dict[str, Any]
Event = dict[str, Any]

_DELTAS = {  # a delta's type and the field that has its piece, by the type of the block that grows
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_SIGNATURE_CHARS = 32


@dataclass(slots=True)
class _Open:
    """The block that grows."""

    start: Block  # as it was before its first piece
    call: int | None = None  # of a tool's use: the call's number
    pieces: list[str] = field(default_factory=list)


class Content:
    """The blocks of one message. `blocks` are those that are complete, in their order."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        self.blocks: list[Block] = []
        self._shows_thoughts = shows_thoughts
        self._open: _Open | None = None

    @property
    def uses_tools(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def take(self, delta: ChoiceDelta) -> Iterator[Event]:
        """The events of what is new."""
        open_call = None if self._open is None else self._open.call
        for piece in pieces(delta, open_call=open_call, is_answer_open=self._is_open("text")):
            match piece:
                case Thought(text):
                    yield from self._grow({"type": "thinking", "thinking": "", "signature": ""}, text)
                case Answer(text):
                    yield from self._grow({"type": "text", "text": ""}, text)
                case call:
                    yield from self._use(call)

    def end(self) -> Iterator[Event]:
        """The events of the last block's end."""
        if self._open is None:
            return
        start, text = self._open.start, "".join(self._open.pieces)
        whole = dict(start)
        if start["type"] == "tool_use":
            whole["input"] = _object(text)
        elif start["type"] == "text":
            whole["text"] = text
        else:
            whole["thinking"] = text if self._shows_thoughts else ""
            whole["signature"] = _signature(text)
            yield self._event("content_block_delta", delta=_delta("signature_delta", signature=whole["signature"]))
        yield self._event("content_block_stop")
        self.blocks.append(whole)
        self._open = None

    def _grow(self, start: Block, text: str) -> Iterator[Event]:
        if not self._is_open(start["type"]):
            yield from self._begin(_Open(start))
        yield from self._add(text)

    def _use(self, call: CallDelta) -> Iterator[Event]:
        if self._open is None or self._open.call != call.index:
            start = {"type": "tool_use", "id": _use_id(call.id or ""), "name": call.name or "", "input": {}}
            yield from self._begin(_Open(start, call=call.index))
        if call.arguments:
            yield from self._add(call.arguments)

    def _begin(self, block: _Open) -> Iterator[Event]:
        yield from self.end()
        self._open = block
        yield self._event("content_block_start", content_block=block.start)

    def _add(self, piece: str) -> Iterator[Event]:
        assert self._open is not None
        self._open.pieces.append(piece)
        kind = self._open.start["type"]
        if kind != "thinking" or self._shows_thoughts:
            name, place = _DELTAS[kind]
            yield self._event("content_block_delta", delta=_delta(name, **{place: piece}))

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open.start["type"] == kind

    def _event(self, kind: str, **fields: object) -> Event:
        return {"type": kind, "index": len(self.blocks), **fields}


def _delta(kind: str, **fields: object) -> dict[str, object]:
    return {"type": kind, **fields}


def _use_id(call_id: str) -> str:
    """As clients know it. Ids that are not of OpenAI's form are those that the model's template insists on."""
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


def _object(text: str) -> dict[str, Any]:
    """A use's input; empty where the model was cut off or has not written an object."""
    try:
        value = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _signature(thought: str) -> str:
    """A digest, for clients that pass back only thoughts that are signed. Nobody checks it."""
    return hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()[:_SIGNATURE_CHARS]

"""Renders replies of /v1/messages: content blocks, the whole message, and the events of a streamed one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire_server.answering.choice import Answer, ChoiceDelta, Thought, pieces
from quire_server.answering.generation import Generation, Usage
from quire_server.answering.prepare import Job
from quire_server.answering.rendering import ReplyHead
from quire_server.dialects.tools import arguments_object
from quire_server.errors import ApiError, NotReady
from quire_server.http.envelopes import anthropic_body
from quire_server.text.parsing.calls import CallDelta
from quire_server.text.tokenizer import TextTokenizer

Block = dict[str, Any]
Event = dict[str, Any]

_DELTAS = {  # (type of the delta, its field for the piece), by the type of the open block
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_SIGNATURE_CHARS = 32


@dataclass(slots=True)
class _Open:
    """The block that is being written."""

    start: Block  # the block without content, for content_block_start
    call: int | None = None  # for tool_use: the call's index
    pieces: list[str] = field(default_factory=list)


class Content:
    """The content blocks of one message. `blocks`: the complete ones, in their order.

    A block is complete before the next one begins; its deltas add up to its content in the whole message.
    """

    def __init__(self, *, shows_thoughts: bool) -> None:
        self.blocks: list[Block] = []
        self._shows_thoughts = shows_thoughts
        self._open: _Open | None = None

    @property
    def uses_tools(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def take(self, delta: ChoiceDelta) -> Iterator[Event]:
        """The events of a delta."""
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
        """The events that end the last block."""
        if self._open is None:
            return
        start, text = self._open.start, "".join(self._open.pieces)
        whole = dict(start)
        if start["type"] == "tool_use":
            whole["input"] = arguments_object(text)
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
    """The id for clients. Ids that are not of OpenAI's form are required by the model's template and stay."""
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


def _signature(thought: str) -> str:
    """A digest, for clients that return only signed thoughts. The server does not check it."""
    return hashlib.sha256(thought.encode("utf-8", "replace")).hexdigest()[:_SIGNATURE_CHARS]


PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_encode = msgspec.json.Encoder().encode


class MessageRenderer:
    """The renderer for /v1/messages: a stream's events add up to the message of a whole reply."""

    def __init__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> None:  # noqa: ARG002 - every dialect's renderer gets it
        self._head = head
        self._generation = generation
        asked = job.options.stop.max_tokens
        self._is_context_short = asked is not None and job.requests[0].stop.max_new_tokens < asked
        self._content = Content(shows_thoughts=job.options.reasoning.show)
        self._is_begun = False

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The events of the deltas, and after the last ones the events that end the message."""
        chunk = b"" if self._is_begun else self._beginning()
        for delta in deltas:
            _check_whole(delta)
            chunk += _framed(self._content.take(delta))
            if delta.finish_reason is not None:
                chunk += _framed(self._content.end()) + self._ending(delta)
        return chunk

    def body(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The whole message from all deltas in the order in which they came."""
        for delta in deltas:
            _check_whole(delta)
            for _ in self._content.take(delta):
                pass
        for _ in self._content.end():
            pass
        return _encode(self._message(self._content.blocks, **self._stop(deltas[-1])))

    def around_text(self) -> None:
        """Frames are of other parts."""

    def failure(self, error: ApiError) -> bytes:
        """The error event; clients raise it, and the message ends with it."""
        return _frame("error", anthropic_body(error, self._head.id))

    def _beginning(self) -> bytes:
        self._is_begun = True
        message = self._message([], stop_reason=None, stop_sequence=None)
        return _frame("message_start", {"type": "message_start", "message": message})

    def _ending(self, delta: ChoiceDelta) -> bytes:
        ended = {"type": "message_delta", "delta": self._stop(delta), "usage": _usage(self._generation.usage)}
        return _framed([ended, {"type": "message_stop"}])

    def _stop(self, delta: ChoiceDelta) -> dict[str, str | None]:
        """Why the message ended; a tool use counts before a stop sequence."""
        if delta.finish_reason == "length":
            reason = "model_context_window_exceeded" if self._is_context_short else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if self._content.uses_tools:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(delta.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _message(self, content: Sequence[dict[str, Any]], **stop: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._head.id}",
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **stop,
            "usage": _usage(self._generation.usage),
        }


def _check_whole(delta: ChoiceDelta) -> None:
    """Raise NotReady for an aborted choice: a part of an answer must not look like the whole."""
    if delta.finish_reason == "abort":
        raise NotReady("The server was stopped before the message was complete.")


def _framed(events: Iterable[Event]) -> bytes:
    return b"".join(_frame(event["type"], event) for event in events)


def _frame(name: str, event: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _usage(usage: Usage) -> dict[str, object]:
    """The input tokens and those read from the cache add up to the prompt's."""
    fields: dict[str, object] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        fields["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return fields

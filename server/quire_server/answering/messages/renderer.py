"""The replies of /v1/messages: the whole message, and the events of a streamed one.

Promises: a stream's events, put together, are the message that the whole reply would be; input tokens and those read
from the cache together are the prompt's. Must not know: sockets, how models write thoughts and uses of tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Generation, Usage
from quire_server.answering.messages.content import Content, Event
from quire_server.answering.prepare import Job
from quire_server.answering.rendering import ReplyHead
from quire_server.errors import ApiError, NotReady
from quire_server.http.envelopes import anthropic_body
from quire_server.text.tokenizer import TextTokenizer

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_encode = msgspec.json.Encoder().encode


class MessageRenderer:
    """One message."""

    def __init__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> None:  # noqa: ARG002 - every dialect's renderer gets it
        self._head = head
        self._generation = generation
        asked = job.options.stop.max_tokens
        self._is_context_short = asked is not None and job.requests[0].stop.max_new_tokens < asked
        self._content = Content(shows_thoughts=job.options.reasoning.show)
        self._is_begun = False

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The events of what is new, after the last news also those of the message's end."""
        chunk = b"" if self._is_begun else self._beginning()
        for delta in deltas:
            _check_whole(delta)
            chunk += _framed(self._content.take(delta))
            if delta.finish_reason is not None:
                chunk += _framed(self._content.end()) + self._ending(delta)
        return chunk

    def body(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The whole message, of all deltas in the order in which they came."""
        for delta in deltas:
            _check_whole(delta)
            for _ in self._content.take(delta):
                pass
        for _ in self._content.end():
            pass
        return _encode(self._message(self._content.blocks, **self._stop(deltas[-1])))

    def failure(self, error: ApiError) -> bytes:
        """What clients raise; there is no message to go on from."""
        return _frame("error", anthropic_body(error, self._head.id))

    def _beginning(self) -> bytes:
        self._is_begun = True
        message = self._message([], stop_reason=None, stop_sequence=None)
        return _frame("message_start", {"type": "message_start", "message": message})

    def _ending(self, delta: ChoiceDelta) -> bytes:
        ended = {"type": "message_delta", "delta": self._stop(delta), "usage": _usage(self._generation.usage)}
        return _framed([ended, {"type": "message_stop"}])

    def _stop(self, delta: ChoiceDelta) -> dict[str, str | None]:
        """Why the message ended; of uses of tools the client must know before all else."""
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
    """No message ends with half of what the model would have said as if that were all."""
    if delta.finish_reason == "abort":
        raise NotReady("The server was stopped before the message was complete.")


def _framed(events: Iterable[Event]) -> bytes:
    return b"".join(_frame(event["type"], event) for event in events)


def _frame(name: str, event: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _usage(usage: Usage) -> dict[str, object]:
    fields: dict[str, object] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens is not None:
        fields["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return fields

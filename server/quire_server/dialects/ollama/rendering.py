"""Renders replies of Ollama's /api/chat and /api/generate: JSON, or a line of JSON for each piece of a stream.

A stream's last line has no content, the reason of the end, and counts and times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Generation
from quire_server.answering.prepare import Job
from quire_server.answering.rendering import ReplyHead
from quire_server.dialects.tools import arguments_object
from quire_server.errors import ApiError, NotReady
from quire_server.http.envelopes import ollama_body
from quire_server.text.logprobs import LogprobFormat
from quire_server.text.parsing.calls import CallDelta
from quire_server.text.parsing.parsed_reply import whole_calls
from quire_server.text.tokenizer import TextTokenizer

_encode = msgspec.json.Encoder().encode


class OllamaRenderer:
    """The renderer for /api/generate; a subclass puts the content into a message. There is one choice."""

    def __init__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> None:
        self._model = head.model
        self._generation = generation
        self._num_logprobs = job.options.reply.num_logprobs
        self._format = LogprobFormat(tokenizer, names_are_ids=False)
        self._began = time.monotonic()
        self._calls: list[CallDelta] = []  # pieces of all calls
        self._num_calls = 0  # in lines so far

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """A line for each delta with content, and the last one."""
        lines = b""
        for delta in deltas:
            self._calls += delta.calls
            is_last = delta.finish_reason is not None
            calls = self._whole_calls(is_last=is_last)
            if delta.text or delta.reasoning or calls or not is_last:
                lines += _line(self._part(delta.text, delta.reasoning, calls, delta) | {"done": False})
            if is_last:
                lines += _line(self._part("", "", [], None) | self._ending(delta))
        return lines

    def body(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The whole reply."""
        (delta,) = deltas
        self._calls = delta.calls
        calls = self._whole_calls(is_last=True)
        return _encode(self._part(delta.text, delta.reasoning, calls, delta) | self._ending(delta))

    def around_text(self) -> None:
        """Frames are of other parts."""

    def failure(self, error: ApiError) -> bytes:
        """The line with which a stream ends; clients raise it."""
        return _line(ollama_body(error))

    def _content(self, text: str, thinking: str, calls: list[CallDelta]) -> dict[str, Any]:  # noqa: ARG002 - chats have calls
        return {"response": text} | ({"thinking": thinking} if thinking else {})

    def _part(self, text: str, thinking: str, calls: list[CallDelta], delta: ChoiceDelta | None) -> dict[str, Any]:
        fields = {"model": self._model, "created_at": now_text(), **self._content(text, thinking, calls)}
        if delta is not None and self._num_logprobs is not None:
            fields["logprobs"] = self._format.chat(delta.logprobs, self._num_logprobs)["content"]
        return fields

    def _ending(self, delta: ChoiceDelta) -> dict[str, Any]:
        """The fields of the end. Raises NotReady for an aborted choice: a part must not look like the whole."""
        if delta.finish_reason == "abort":
            raise NotReady("The server was stopped before the answer was complete.")
        usage, (record,) = self._generation.usage, self._generation.summaries()
        first = record.ended if record.first is None else record.first
        before = first - self._began
        prefill = before if record.prefill_seconds is None else min(record.prefill_seconds, before)
        return {
            "done": True,
            "done_reason": "length" if delta.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._began),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(prefill),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(record.ended - first),
        }

    def _whole_calls(self, *, is_last: bool) -> list[CallDelta]:
        """The calls that are complete and were in no line yet: all but the one that is being written."""
        if not self._calls:
            return []
        calls = whole_calls(self._calls)
        complete = calls[self._num_calls : None if is_last else -1]
        self._num_calls += len(complete)
        return complete


class OllamaChatRenderer(OllamaRenderer):
    """The renderer for /api/chat."""

    def _content(self, text: str, thinking: str, calls: list[CallDelta]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": call.index, "name": call.name, "arguments": arguments_object(call.arguments)},
                }
                for call in calls
            ]
        return {"message": message}


def loaded(model: str, reason: str, *, is_chat: bool) -> dict[str, Any]:
    """The reply to a request without a prompt, with which clients load a model or let it go: the reason says which."""
    content = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": now_text(), **content, "done": True, "done_reason": reason}


def now_text() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * max(seconds, 0.0))


def _line(fields: object) -> bytes:
    return _encode(fields) + b"\n"

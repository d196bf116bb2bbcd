"""The replies of /v1/responses: the whole object, and the events of a streamed one.

Promises: the object at a stream's end is the one that the whole reply would be; events are numbered without a gap;
whatever happens after the first event, a stream ends with completed, incomplete or failed. Must not know: sockets, the
store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Generation, Usage
from quire_server.answering.prepare import Job
from quire_server.answering.rendering import ReplyHead
from quire_server.answering.responses.ids import response_id
from quire_server.answering.responses.output import Event, Output
from quire_server.errors import ApiError, error_body
from quire_server.text.logprobs import LogprobFormat
from quire_server.text.tokenizer import TextTokenizer

_encode = msgspec.json.Encoder().encode

Keep = Callable[[bytes, Sequence[Mapping[str, Any]]], None]

_STOPPED = {"code": "server_error", "message": "The server was stopped before the response was complete."}


class ResponseRenderer:
    """One response. `shown` is what it repeats of its request; `keep` takes it, and its items, once it has ended."""

    def __init__(
        self,
        head: ReplyHead,
        job: Job,
        generation: Generation,
        *,
        tokenizer: TextTokenizer,
        stem: str,
        shown: Mapping[str, Any],
        keep: Keep,
    ) -> None:
        wanted = job.options.reply.num_logprobs
        form = LogprobFormat(tokenizer, names_are_ids=False)
        self._head = head
        self._generation = generation
        self._id = response_id(stem)
        self._shown = shown
        self._keep = keep
        self._output = Output(stem, lambda some: [] if wanted is None else form.chat(some, wanted)["content"])
        self._num_events = 0

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The events of what is new, after the last news also those of the response's end."""
        chunk = b"" if self._num_events else self._beginning()
        finish = None
        for delta in deltas:
            chunk += self._framed(self._take(delta))
            finish = delta.finish_reason or finish
        if finish is None:
            return chunk
        chunk += self._framed(self._output.end(is_cut=finish in ("length", "abort")))
        response = self._ended(finish)
        self._save(response)
        return chunk + self._framed([{"type": f"response.{response['status']}", "response": response}])

    def body(self, deltas: Sequence[ChoiceDelta]) -> Iterator[bytes]:
        """The whole response, of all deltas in the order in which they came; empty pieces while it is put together."""
        finish = "length"
        for delta in deltas:
            for _ in self._take(delta):
                pass
            finish = delta.finish_reason or finish
            yield b""
        for _ in self._output.end(is_cut=finish in ("length", "abort")):
            pass
        yield self._save(self._ended(finish))

    def failure(self, error: ApiError) -> bytes:
        """Both events that clients look for: the error, and the response that failed."""
        chunk = b"" if self._num_events else self._beginning()
        chunk += self._framed(self._output.end(is_cut=True))
        detail = error_body(error)["error"]
        failed = self._response("failed", error={"code": "server_error", "message": detail["message"]})
        told = {"type": "error", "code": detail["code"], "message": detail["message"], "param": detail["param"]}
        return chunk + self._framed([told, {"type": "response.failed", "response": failed}])

    def _take(self, delta: ChoiceDelta) -> Iterator[Event]:
        if delta.finish_reason in ("stop", "tool_calls") and not isinstance(delta.stop_reason, str):
            del delta.logprobs[-1:]  # the token that ended the text is not part of it
        return self._output.take(delta)

    def _beginning(self) -> bytes:
        response = self._response("in_progress")
        return self._framed([{"type": f"response.{kind}", "response": response} for kind in ("created", "in_progress")])

    def _framed(self, events: Iterable[Event]) -> bytes:
        frames = []
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
            frames.append(b"event: " + event["type"].encode() + b"\ndata: " + _encode(event) + b"\n\n")
        return b"".join(frames)

    def _ended(self, finish: str) -> dict[str, Any]:
        usage = _usage(self._generation.usage)
        if finish == "length":
            return self._response("incomplete", incomplete_details={"reason": "max_output_tokens"}, usage=usage)
        if finish == "abort":
            return self._response("failed", error=_STOPPED, usage=usage)
        return self._response("completed", completed_at=int(time.time()), usage=usage)

    def _response(self, status: str, **fields: object) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": [*self._output.items],
            "usage": None,
            **self._shown,
            **fields,
        }

    def _save(self, response: dict[str, Any]) -> bytes:
        raw = _encode(response)
        if response["status"] != "failed":
            self._keep(raw, response["output"])
        return raw


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

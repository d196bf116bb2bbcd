"""Renders replies of /v1/responses: ids, output items, the whole object, and the events of a streamed one."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from quire_engine.contract.types import TokenLogprobs
from quire_server.answering.choice import Answer, ChoiceDelta, Thought, pieces
from quire_server.answering.generation import Generation, Usage
from quire_server.answering.prepare import Job
from quire_server.answering.rendering import ReplyHead
from quire_server.dialects.responses.tools import Offered
from quire_server.errors import ApiError, error_body
from quire_server.text.logprobs import LogprobFormat
from quire_server.text.parsing.calls import CallDelta
from quire_server.text.tokenizer import TextTokenizer

_STEM_CHARS = 48


def new_stem() -> str:
    """The random common part of a response's id and its items' ids; it cannot be guessed."""
    return secrets.token_hex(_STEM_CHARS // 2)


def response_id(stem: str) -> str:
    return f"resp_{stem}"


def item_id(prefix: str, stem: str, number: int, *, of_input: bool = False) -> str:
    return f"{prefix}_{stem}{'i' if of_input else 'o'}{number}"


def response_of(item: str) -> str:
    """The id of the response that an item belongs to, from the item's id."""
    return response_id(item.partition("_")[2][:_STEM_CHARS])


Event = dict[str, Any]
Item = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
FormatLogprobs = Callable[[Sequence[TokenLogprobs]], Sequence[Any]]


class Output:
    """The output items of one response. `items`: the complete ones, in their order."""

    def __init__(self, stem: str, format_logprobs: FormatLogprobs, tools: Mapping[str, Offered]) -> None:
        """`tools`: by the names that the model knows them by."""
        self.items: list[Item] = []
        self._stem = stem
        self._tools = tools
        self._format_logprobs = format_logprobs
        self._open: _Thought | _Message | _Call | None = None
        self._unseen: list[TokenLogprobs] = []  # log-probabilities of tokens whose text has not come yet
        self._num_fresh = 0  # entries of `_unseen` from the last delta

    def take(self, delta: ChoiceDelta) -> Iterator[Event]:
        """The events of a delta."""
        self._unseen += delta.logprobs
        self._num_fresh = len(delta.logprobs)
        open_call = self._open.index if isinstance(self._open, _Call) else None
        for piece in pieces(delta, open_call=open_call, is_answer_open=isinstance(self._open, _Message)):
            match piece:
                case Thought(text):
                    yield from self._add_reasoning(text)
                case Answer(text):
                    yield from self._add_text(text)
                case call:
                    yield from self._add_call(call)

    def end(self, *, is_cut: bool) -> Iterator[Event]:
        """The events that end the last item. `is_cut`: the item is incomplete.

        An answer that ended by itself without text and without a call gets an empty message, because clients expect
        one.
        """
        if not is_cut and all(item["type"] == "reasoning" for item in self.items) and not self._is_answering:
            yield from self._begin(_Message(self._next_id("msg")))
        yield from self._close("incomplete" if is_cut else "completed")

    @property
    def _is_answering(self) -> bool:
        return isinstance(self._open, _Message | _Call)

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, _Thought):
            yield from self._begin(_Thought(self._next_id("rs")))
        assert isinstance(self._open, _Thought)
        yield self._event(self._open.grow(text))

    def _add_text(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, _Message):
            if self._open is not None:  # only the answer has log-probabilities, not reasoning, calls, marks
                del self._unseen[: len(self._unseen) - self._num_fresh]
            yield from self._begin(_Message(self._next_id("msg")))
        assert isinstance(self._open, _Message)
        yield self._event(self._open.grow(text, self._format_logprobs(self._unseen)))
        self._unseen.clear()

    def _add_call(self, call: CallDelta) -> Iterator[Event]:
        if not isinstance(self._open, _Call) or self._open.index != call.index:
            tool = self._tools.get(call.name or "")
            is_custom = tool is not None and tool.is_custom
            new = _CustomCall(self._next_id("ctc"), call, tool) if is_custom else _Call(self._next_id("fc"), call, tool)
            yield from self._begin(new)
        assert isinstance(self._open, _Call)
        if call.arguments:
            for event in self._open.grow(call.arguments):
                yield self._event(event)

    def _begin(self, item: _Thought | _Message | _Call) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        yield self._event({"type": "response.output_item.added", "item": item.item("in_progress")})
        for event in item.begun():
            yield self._event(event)

    def _close(self, status: ItemStatus) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        for event in item.ended():
            yield self._event(event)
        whole = item.item(status)
        yield self._event({"type": "response.output_item.done", "item": whole})
        self.items.append(whole)
        self._open = None

    def _next_id(self, prefix: str) -> str:
        """The id of the item after the open one."""
        return item_id(prefix, self._stem, len(self.items) + (self._open is not None))

    def _event(self, event: Event) -> Event:
        return {**event, "output_index": len(self.items)}


class _Thought:
    def __init__(self, id: str) -> None:
        self._id = id
        self._texts: list[str] = []

    def begun(self) -> list[Event]:
        return [self._event("response.content_part.added", part={"type": "reasoning_text", "text": ""})]

    def grow(self, text: str) -> Event:
        self._texts.append(text)
        return self._event("response.reasoning_text.delta", delta=text)

    def ended(self) -> list[Event]:
        text = "".join(self._texts)
        return [
            self._event("response.reasoning_text.done", text=text),
            self._event("response.content_part.done", part={"type": "reasoning_text", "text": text}),
        ]

    def item(self, status: ItemStatus) -> Item:
        content = [{"type": "reasoning_text", "text": "".join(self._texts)}] if self._texts else []
        return {
            "id": self._id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
            "encrypted_content": None,
        }

    def _event(self, kind: str, **fields: object) -> Event:
        return {"type": kind, "item_id": self._id, "content_index": 0, **fields}


class _Message:
    def __init__(self, id: str) -> None:
        self._id = id
        self._has_part = False
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def begun(self) -> list[Event]:
        event = self._event("response.content_part.added", part=self._part())
        self._has_part = True
        return [event]

    def grow(self, text: str, logprobs: Sequence[Any]) -> Event:
        self._texts.append(text)
        self._logprobs += logprobs
        return self._event("response.output_text.delta", delta=text, logprobs=logprobs)

    def ended(self) -> list[Event]:
        part = self._part()
        return [
            self._event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", part=part),
        ]

    def item(self, status: ItemStatus) -> Item:
        content = [self._part()] if self._has_part else []
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": [*self._logprobs]}

    def _event(self, kind: str, **fields: object) -> Event:
        return {"type": kind, "item_id": self._id, "content_index": 0, **fields}


class _Call:
    def __init__(self, id: str, call: CallDelta, tool: Offered | None) -> None:
        self.index = call.index
        self._id = id
        self._call_id = call.id or f"call_{id.partition('_')[2]}"
        self._name = (call.name or "") if tool is None else tool.name
        self._namespace = None if tool is None else tool.namespace
        self._arguments: list[str] = []

    def begun(self) -> list[Event]:
        return []

    def grow(self, arguments: str) -> list[Event]:
        self._arguments.append(arguments)
        return [{"type": "response.function_call_arguments.delta", "item_id": self._id, "delta": arguments}]

    def ended(self) -> list[Event]:
        return [
            {
                "type": "response.function_call_arguments.done",
                "item_id": self._id,
                "name": self._name,
                "arguments": "".join(self._arguments),
            }
        ]

    def item(self, status: ItemStatus) -> Item:
        return self._item("function_call", status, arguments="".join(self._arguments))

    def _item(self, kind: str, status: ItemStatus, **said: str) -> Item:
        named = {} if self._namespace is None else {"namespace": self._namespace}
        head = {"id": self._id, "type": kind, "status": status, "call_id": self._call_id, "name": self._name}
        return {**head, **named, **said}


class _CustomCall(_Call):
    """A call whose input is the text of the one argument that the model wrote."""

    def __init__(self, id: str, call: CallDelta, tool: Offered | None) -> None:
        super().__init__(id, call, tool)
        self._input = InputText()

    def grow(self, arguments: str) -> list[Event]:
        return self._deltas(self._input.push(arguments))

    def ended(self) -> list[Event]:
        events = self._deltas(self._input.finish())
        kind = "response.custom_tool_call_input.done"
        return [*events, {"type": kind, "item_id": self._id, "input": self._input.text}]

    def item(self, status: ItemStatus) -> Item:
        return self._item("custom_tool_call", status, input=self._input.text)

    def _deltas(self, text: str) -> list[Event]:
        event = {"type": "response.custom_tool_call_input.delta", "item_id": self._id, "delta": text}
        return [event] if text else []


class InputText:
    """The text of the argument `input`, read from a call's JSON arguments while they come.

    Arguments of another form are the input as they are: nothing that a model has written is lost.
    """

    def __init__(self) -> None:
        self.text = ""
        self._raw = ""  # what has not been read yet
        self._has_begun = False

    def push(self, arguments: str) -> str:
        """The text that is complete with these."""
        self._raw += arguments
        if not self._has_begun:
            start = _INPUT_START.match(self._raw)
            if start is None:
                return ""
            self._has_begun, self._raw = True, self._raw[start.end() :]
        whole = _INPUT_PIECES.match(self._raw)
        assert whole is not None
        self._raw = self._raw[whole.end() :]
        return self._take(json.loads(f'"{whole[0]}"', strict=False))

    def finish(self) -> str:
        """The arguments are there, or will not come: the text that is left."""
        if self._has_begun:
            return ""
        try:
            found = json.loads(self._raw, strict=False)
        except ValueError:
            found = None
        text = found.get("input") if isinstance(found, dict) else found
        return self._take(text if isinstance(text, str) else self._raw)

    def _take(self, text: str) -> str:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self.text += text
        return text


_INPUT_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# What a string of JSON is made of, the halves of a character beyond 16 bits together.
_INPUT_PIECES = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)


_encode = msgspec.json.Encoder().encode

Keep = Callable[[bytes, Sequence[Mapping[str, Any]]], None]

_STOPPED = {"code": "server_error", "message": "The server was stopped before the response was complete."}


class ResponseRenderer:
    """Renders one response. `shown`: fields of the request that it repeats; `tools`: by the names that the model knows;
    `keep`: stores it at its end.

    The object at a stream's end equals the whole reply. Events are numbered without a gap; after its first event a
    stream always ends with completed, incomplete or failed.
    """

    def __init__(
        self,
        head: ReplyHead,
        job: Job,
        generation: Generation,
        *,
        tokenizer: TextTokenizer,
        stem: str,
        shown: Mapping[str, Any],
        tools: Mapping[str, Offered],
        keep: Keep,
    ) -> None:
        wanted = job.options.reply.num_logprobs
        form = LogprobFormat(tokenizer, names_are_ids=False)
        self._head = head
        self._generation = generation
        self._id = response_id(stem)
        self._shown = shown
        self._keep = keep
        self._output = Output(stem, lambda some: [] if wanted is None else form.chat(some, wanted)["content"], tools)
        self._num_events = 0

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The events of the deltas, and after the last ones the events that end the response."""
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
        """The whole response from all deltas in the order in which they came; yields empty pieces meanwhile."""
        finish = "length"
        for delta in deltas:
            for _ in self._take(delta):
                pass
            finish = delta.finish_reason or finish
            yield b""
        for _ in self._output.end(is_cut=finish in ("length", "abort")):
            pass
        yield self._save(self._ended(finish))

    def around_text(self) -> None:
        """Frames are of other parts."""

    def failure(self, error: ApiError) -> bytes:
        """The two events that clients look for: the error, and the failed response."""
        chunk = b"" if self._num_events else self._beginning()
        chunk += self._framed(self._output.end(is_cut=True))
        detail = error_body(error)["error"]
        failed = self._response("failed", error={"code": "server_error", "message": detail["message"]})
        event = {"type": "error", "code": detail["code"], "message": detail["message"], "param": detail["param"]}
        return chunk + self._framed([event, {"type": "response.failed", "response": failed}])

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

"""A response's output items as they grow, and the events that tell of it.

Promises: an item is complete before the next one begins; the deltas of an item, joined, are what its end says, and the
items are the same however the generation was cut into deltas of one kind. Must not know: frames, the whole response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from quire_engine.types import TokenLogprobs
from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.pieces import Answer, Thought, pieces
from quire_server.answering.responses.ids import item_id
from quire_server.text.parsing.calls import CallDelta

Event = dict[str, Any]
Item = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
FormatLogprobs = Callable[[Sequence[TokenLogprobs]], Sequence[Any]]


class Output:
    """The items of one response. `items` are those that are complete, in their order."""

    def __init__(self, stem: str, format_logprobs: FormatLogprobs) -> None:
        self.items: list[Item] = []
        self._stem = stem
        self._format_logprobs = format_logprobs
        self._open: _Thought | _Message | _Call | None = None
        self._unseen: list[TokenLogprobs] = []  # of tokens whose text is not there yet
        self._num_fresh = 0  # of those, the last delta's

    def take(self, delta: ChoiceDelta) -> Iterator[Event]:
        """The events of what is new."""
        self._unseen += delta.logprobs
        self._num_fresh = len(delta.logprobs)
        open_call = self._open.index if isinstance(self._open, _Call) else None
        for piece in pieces(delta, open_call=open_call, is_answer_open=isinstance(self._open, _Message)):
            match piece:
                case Thought(text):
                    yield from self._think(text)
                case Answer(text):
                    yield from self._say(text)
                case call:
                    yield from self._call(call)

    def end(self, *, is_cut: bool) -> Iterator[Event]:
        """The events of the last item's end. `is_cut`: it stops in its midst.

        An answer that ended by itself, without a word and without a call, is an empty message: clients look for one.
        """
        if not is_cut and all(item["type"] == "reasoning" for item in self.items) and not self._is_answering:
            yield from self._begin(_Message(self._next_id("msg")))
        yield from self._close("incomplete" if is_cut else "completed")

    @property
    def _is_answering(self) -> bool:
        return isinstance(self._open, _Message | _Call)

    def _think(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, _Thought):
            yield from self._begin(_Thought(self._next_id("rs")))
        assert isinstance(self._open, _Thought)
        yield self._event(self._open.grow(text))

    def _say(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, _Message):
            if self._open is not None:  # log-probabilities are shown of the answer only, not of thoughts, calls, marks
                del self._unseen[: len(self._unseen) - self._num_fresh]
            yield from self._begin(_Message(self._next_id("msg")))
        assert isinstance(self._open, _Message)
        yield self._event(self._open.grow(text, self._format_logprobs(self._unseen)))
        self._unseen.clear()

    def _call(self, call: CallDelta) -> Iterator[Event]:
        if not isinstance(self._open, _Call) or self._open.index != call.index:
            yield from self._begin(_Call(self._next_id("fc"), call))
        assert isinstance(self._open, _Call)
        if call.arguments:
            yield self._event(self._open.grow(call.arguments))

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
        """The id of the item after the one that is open."""
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
    def __init__(self, id: str, call: CallDelta) -> None:
        self.index = call.index
        self._id = id
        self._call_id = call.id or f"call_{id.partition('_')[2]}"
        self._name = call.name or ""
        self._arguments: list[str] = []

    def begun(self) -> list[Event]:
        return []

    def grow(self, arguments: str) -> Event:
        self._arguments.append(arguments)
        return {"type": "response.function_call_arguments.delta", "item_id": self._id, "delta": arguments}

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
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }

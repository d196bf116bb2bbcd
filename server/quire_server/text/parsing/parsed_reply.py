"""The parsed part of a reply's text: content, calls, and thoughts where the format of calls has them too.

Owns the calls' numbers and ids. Promises: whitespace before the first call, between calls and after the last one is not
content; every other character is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from quire_server.text.parsing.calls import CallDelta

Schemas = Mapping[str, Mapping[str, object] | None]  # schemas of the tools' arguments, by the tools' names
_SPACE = " \t\r\n"


class ParsedReply:
    """Filled by a format's reader, emptied by `take_content` and `take_calls`."""

    def __init__(
        self, tools: Schemas, *, new_id: Callable[[], str], parallel: bool = True, parts_thoughts: bool = True
    ) -> None:
        """`parallel` False: only the first call is kept. `parts_thoughts` False: thoughts are content."""
        self.tools = tools
        self.num_calls = 0
        self.is_thinking = False  # whether the text is within thoughts
        self.error: str | None = None  # the first error in a call
        self._new_id = new_id
        self._parallel = parallel
        self._parts_thoughts = parts_thoughts
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._ids: set[str] = set()
        self._space: list[str] | None = []  # whitespace that is content if text follows; None within text
        self._calls: list[CallDelta] = []
        self._pieces: list[str] = []  # new arguments of the last of `_calls`
        self._arguments: list[str] = []  # all arguments of the open call
        self._is_dropped = False  # whether the open call is dropped

    def content(self, text: str) -> None:
        if self._space is not None:
            body = text.lstrip(_SPACE)
            self._space.append(text[: len(text) - len(body)])
            if not body:
                return
            self._content += self._space
            self._space, text = None, body
        self._content.append(text)

    def think(self, text: str) -> None:
        if self._parts_thoughts:
            self._thoughts.append(text)
        else:
            self.content(text)

    def begin_call(self, name: str, call_id: str = "") -> None:
        """The name need not be a known tool's: the client decides on that. `call_id`: the model's own, if it has one.

        The model's id is replaced where the reply has used it.
        """
        self._space = []
        self._arguments = []
        self._is_dropped = self.num_calls > 0 and not self._parallel
        if not self._is_dropped:
            self._settle()
            if not call_id or call_id in self._ids:
                call_id = self._new_id()
            self._ids.add(call_id)
            self._calls.append(CallDelta(index=self.num_calls, id=call_id, name=name))
            self.num_calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the open call's arguments."""
        if self._is_dropped:
            return
        if not self._calls:  # earlier pieces were taken
            self._calls.append(CallDelta(index=self.num_calls - 1))
        self._pieces.append(text)
        self._arguments.append(text)

    def end_call(self) -> None:
        """The open call has ended, complete or not."""
        if self._is_dropped:
            return
        try:
            is_object = isinstance(read_json("".join(self._arguments)), dict)
        except ValueError:
            is_object = False
        if not is_object:
            self.fail("The arguments of a call are not a JSON object.")
        self._arguments = []

    def fail(self, error: str) -> None:
        self.error = self.error or error

    def take_content(self) -> str:
        content, self._content = self._content, []
        return "".join(content)

    def take_thoughts(self) -> str:
        thoughts, self._thoughts = self._thoughts, []
        return "".join(thoughts)

    def take_calls(self) -> list[CallDelta]:
        """The new pieces, at most one for each call."""
        self._settle()
        calls, self._calls = self._calls, []
        return calls

    def finish(self) -> None:
        """The text has ended."""
        if self._space is not None and self.num_calls == 0:
            self._content += self._space

    def _settle(self) -> None:
        if self._pieces:
            self._calls[-1].arguments = "".join(self._pieces)
            self._pieces = []


def read_json(text: str) -> object:
    """The value. Raises ValueError, also for constants that only Python accepts, and for deep nesting."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except RecursionError as exc:
        raise ValueError("nested too deep") from exc
    return value


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")


def whole_calls(pieces: Iterable[CallDelta]) -> list[CallDelta]:
    """The whole calls from all of their pieces, in order."""
    calls: list[CallDelta] = []
    arguments: list[list[str]] = []
    for piece in pieces:
        if piece.index == len(calls):
            calls.append(CallDelta(index=piece.index, id=piece.id, name=piece.name))
            arguments.append([])
        arguments[piece.index].append(piece.arguments)
    for call, texts in zip(calls, arguments, strict=True):
        call.arguments = "".join(texts)
    return calls

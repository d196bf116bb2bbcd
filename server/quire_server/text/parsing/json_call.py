"""Parses a call that a model writes as a JSON object: {"name": ..., "arguments": {...}}.

Promises: the name is known as soon as it is read, and the arguments are passed on as they come, character for
character. Only brackets and strings are parsed in them, so that a client gets the model's text even where it is not
quite JSON.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Show, Source, Steps

Outcome = Literal["call", "broken", "none"]  # broken: the call was shown, but its object is not complete

_ARGUMENTS = frozenset({"arguments", "parameters"})
_OF_CALLS = frozenset({"type", "id"})  # other keys that models write in calls
_BETWEEN = " \t\r\n,]"  # characters after a call in an array that are not content
_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE = re.compile(r'[^"{}\[\]<]+')
_SCALAR = re.compile(r'[^\s,{}\[\]"<]+')


def read_call(source: Source, reply: ParsedReply, *, sure: bool) -> Steps[Outcome]:
    """Read the object that begins here. If it is not a call, nothing is passed on and `source.kept` has its text.

    `sure`: only calls can stand here. Otherwise the object may be the answer itself, which may have names too: then it
    is a call only if it names a tool and has only keys of calls.
    """
    source.keep()
    return (yield from _CallReader(source, reply, sure).read())


def read_calls(source: Source, reply: ParsedReply, before: str, *, sure: bool) -> Steps[None]:
    """Read an array of calls, or a single one. Text that is not a call is content, after `before`."""
    is_array = yield from source.literal("[")
    before += "[" if is_array else ""
    while True:
        before += yield from source.space()
        char = yield from source.peek()
        if char == "{":
            outcome = yield from read_call(source, reply, sure=sure)
            if outcome == "none":
                reply.content(before + source.kept())
            if outcome != "call" or not is_array:
                return
            before = ""
        elif char == "," and is_array:
            before += source.take()
        else:
            is_end = char == "" or (char == "]" and is_array)
            if char == "]" and is_array:
                before += source.take()
            if not is_end or before.strip(_BETWEEN):
                reply.content(before)
            return


class _CallReader:
    """Reads one object."""

    def __init__(self, source: Source, reply: ParsedReply, sure: bool) -> None:
        self._source = source
        self._reply = reply
        self._sure = sure
        self._name = ""
        self._held: list[str] | None = None  # the arguments, until the call has begun
        self._has_arguments = False
        self._begun = False

    def read(self) -> Steps[Outcome]:
        yield from self._source.literal("{")
        while True:
            yield from self._source.space()
            char = yield from self._source.peek()
            if char == "}":
                self._source.take()
                return self._close()
            if char == ",":
                self._source.take()
            elif char != '"' or not (yield from self._member()):
                return self._break_off()

    def _member(self) -> Steps[bool]:
        """A key and its value; False if the text is not one, or not one of a call."""
        source = self._source
        key = yield from read_text(source)
        yield from source.space()
        if key is None or not (yield from source.literal(":")):
            return False
        yield from source.space()
        if key == "name" and not self._name and (yield from source.peek()) == '"':
            return (yield from self._read_name())
        if key in _ARGUMENTS and not self._has_arguments:
            return (yield from self._read_arguments())
        if not self._sure and not self._begun and key not in _OF_CALLS:
            return False
        return (yield from read_value(source, _ignore))

    def _read_name(self) -> Steps[bool]:
        self._name = (yield from read_text(self._source)) or ""
        if not self._name or not (self._sure or self._name in self._reply.tools):
            return False
        if self._sure or self._held is not None:
            self._begin()
        return True

    def _read_arguments(self) -> Steps[bool]:
        self._has_arguments = True
        if self._name and not self._begun:
            self._begin()
        if not self._begun:
            self._held = []
        show = self._reply.arguments if self._held is None else self._held.append
        char = yield from self._source.peek()
        if char == '"':  # encoded twice
            text = yield from read_text(self._source)
            if text is not None:
                show(text or "{}")
            return text is not None
        if char in {"{", "["}:
            return (yield from read_value(self._source, show))
        text = yield from self._source.run(_SCALAR)
        show("{}" if text == "null" else text)
        return text != ""

    def _begin(self) -> None:
        self._begun = True
        self._source.kept()
        self._reply.begin_call(self._name)
        for text in self._held or ():
            self._reply.arguments(text)
        self._held = None

    def _close(self) -> Outcome:
        if not self._name:
            return self._break_off()
        if not self._begun:
            self._begin()
        if not self._has_arguments:
            self._reply.arguments("{}")
        self._reply.end_call()
        return "call"

    def _break_off(self) -> Outcome:
        if self._begun:
            self._reply.end_call()
            return "broken"
        if self._sure:
            self._reply.fail("A call is not finished, or it is not written as calls are.")
        return "none"


def read_text(source: Source) -> Steps[str | None]:
    """The string that begins here, decoded; None if it does not end or is not valid."""
    pieces: list[str] = []
    if not (yield from _read_string(source, pieces.append)):
        return None
    try:
        text: str = json.loads("".join(pieces), strict=False)
        text.encode()  # half a surrogate pair can be written as an escape, but not sent
    except ValueError:
        return None
    return text


def read_value(source: Source, show: Show) -> Steps[bool]:
    """Show the value that begins here; False if the text ends or can be no JSON before it does."""
    depth = 0
    while True:
        char = yield from source.peek()
        if char == '"':
            if not (yield from _read_string(source, show)):
                return False
        elif char in {"{", "["}:
            depth += 1
            show(source.take())
        elif char in {"}", "]"}:
            if depth == 0:
                return False
            depth -= 1
            show(source.take())
        elif char in {"", "<"}:
            return False
        elif depth == 0:
            show((yield from source.run(_SCALAR)))
        else:
            show(source.match(_OUTSIDE))
        if depth == 0:
            return True


def _read_string(source: Source, show: Show) -> Steps[bool]:
    show(source.take())
    while True:
        char = yield from source.peek()
        if char == "":
            return False
        if char == '"':
            show(source.take())
            return True
        if char == "\\":
            show(source.take())
            if (yield from source.peek()):
                show(source.take())
        else:
            show(source.match(_IN_STRING))


def _ignore(text: str) -> None:
    """A value that calls have and clients do not get."""

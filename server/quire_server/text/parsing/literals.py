"""Values that models write in other notations than JSON, passed on as JSON: Python's literals, and Gemma's.

Promises: time is linear in the text, however deep it is nested; a string is passed on as it comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from quire_server.text.parsing.parsed_reply import read_json
from quire_server.text.parsing.source import Markers, Show, Source, Steps

_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_JSON_CLOSERS = {"]": "]", ")": "]", "}": "}"}
_NAMES = {"True": "true", "False": "false", "None": "null", "none": "null", "nil": "null"}
_HEX = re.compile(r"[0-9a-fA-F]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """A way to write values. `string` shows a string as JSON: False if none begins here, None if it does not end."""

    string: Callable[[Source, Show], Steps[bool | None]]
    scalar: re.Pattern[str]  # characters of numbers and names


def read_literal(source: Source, show: Show, notation: Notation) -> Steps[bool]:
    """Show the value that begins here as JSON; False if the text ends or can be no value before it does."""
    closers: list[str] = []
    while True:
        yield from source.space()
        closer = _CLOSERS.get((yield from source.peek()))
        if closer is not None:
            show("{" if source.take() == "{" else "[")
            closers.append(closer)
            yield from source.space()
            if (yield from source.peek()) != closer:
                if closer == "}" and not (yield from _read_key(source, show, notation)):
                    return False
                continue
        elif not (yield from _read_leaf(source, show, notation)):
            return False
        while closers:  # a value has ended
            yield from source.space()
            char = yield from source.peek()
            if char == ",":
                source.take()
                yield from source.space()
                char = yield from source.peek()
                if char != closers[-1]:
                    show(", ")
                    if closers[-1] == "}" and not (yield from _read_key(source, show, notation)):
                        return False
                    break
            if char == "" or char != closers[-1]:
                return False
            source.take()
            show(_JSON_CLOSERS[closers.pop()])
        else:
            return True


def _read_key(source: Source, show: Show, notation: Notation) -> Steps[bool]:
    pieces: list[str] = []
    is_string = yield from notation.string(source, pieces.append)
    if is_string is None:
        return False
    key = "".join(pieces) if is_string else _dumps((yield from source.run(notation.scalar)).strip())
    yield from source.space()
    show(f"{key}: ")
    return (yield from source.literal(":"))


def _read_leaf(source: Source, show: Show, notation: Notation) -> Steps[bool]:
    is_string = yield from notation.string(source, show)
    if is_string is None or is_string:
        return is_string is not None
    text = (yield from source.run(notation.scalar)).strip()
    show(_scalar(text))
    return text != ""


def _scalar(text: str) -> str:
    """A number or a name as JSON; anything else is a text without quotes."""
    text = _NAMES.get(text, text)
    try:
        read_json(text)
    except ValueError:
        return _python_number(text) or _dumps(text)
    return text


def _python_number(text: str) -> str:
    """A number as JSON that only Python reads, such as 0x10, 1_000 or .5; empty if it is none."""
    if len(text) > 64 or text[:1] not in "+-.0123456789":
        return ""
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        return json.dumps(float(text), allow_nan=False)
    except ValueError:
        return ""


_QUOTES = ("'", '"')
_IN_QUOTES = {quote: re.compile(rf"[^{quote}\\]+") for quote in _QUOTES}
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", "'": "'", '"': '\\"', "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}


def _python_string(source: Source, show: Show) -> Steps[bool | None]:
    quote = yield from source.peek()
    if quote not in _QUOTES:
        return False
    source.take()
    show('"')
    while True:
        char = yield from source.peek()
        if char == "":
            return None
        if char == quote:
            source.take()
            show('"')
            return True
        if char == "\\":
            source.take()
            yield from _read_escape(source, show)
        else:
            show(_dumps(source.match(_IN_QUOTES[quote]))[1:-1])


def _read_escape(source: Source, show: Show) -> Steps[None]:
    """The part of an escape after its backslash. An unknown one stands for itself, as in Python."""
    if not (yield from source.peek()):
        return
    char = source.take()
    if char not in _DIGITS:
        show(_ESCAPES[char] if char in _ESCAPES else "\\\\" + _dumps(char)[1:-1])
        return
    digits = ""
    while len(digits) < _DIGITS[char] and _HEX.match((yield from source.peek())):
        digits += source.take()
    code = int(digits, 16) if len(digits) == _DIGITS[char] else 0x110000
    if code > 0x10FFFF:
        show(f"\\\\{char}{digits}")
    else:
        show(f"\\u{code:04x}" if code < 0x10000 else _dumps(chr(code))[1:-1])


PYTHON = Notation(string=_python_string, scalar=re.compile(r"[^\s,:=()\[\]{}<'\"]+"))


def delimited(mark: str) -> Notation:
    """Gemma's notation: keys without quotes, and strings between two of these marks, without escapes."""
    ends = Markers(mark)

    def string(source: Source, show: Show) -> Steps[bool | None]:
        if not (yield from source.literal(mark)):
            return False
        show('"')
        if not (yield from source.until(ends, lambda text: show(_dumps(text)[1:-1]))):
            return None
        show('"')
        return True

    return Notation(string=string, scalar=re.compile(r"[^,:\[\]{}<]+"))


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

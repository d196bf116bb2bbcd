"""JSON in pieces: objects, long lists and long texts as bytes that are made one piece after the other.

Promises: the pieces joined are the JSON that the encoder makes of the whole; each takes a few milliseconds at most.
Must not know: what it is about, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

Item = TypeVar("Item")

IDS_AT_ONCE = 1 << 14
CHARS_AT_ONCE = 1 << 16

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Pieces:
    """A value that is encoded already, or will be when it is its turn."""

    parts: Iterator[bytes]


def pieces_of_object(fields: Mapping[str, object], *, begin: bytes = b"{", end: bytes = b"}") -> Iterator[bytes]:
    """An object, of whose values some may be `Pieces`; the others are encoded at once.

    With another beginning or end it is a part of one that others have begun or will end.
    """
    start = begin
    plain: dict[str, object] = {}
    for name, value in fields.items():
        if not isinstance(value, Pieces):
            plain[name] = value
            continue
        if plain:
            yield start + encode(plain)[1:-1]
            plain, start = {}, b","
        yield start + encode(name) + b":"
        yield from value.parts
        start = b","
    yield (start + encode(plain)[1:-1] if plain else b"" if fields else begin) + end


def pieces_of_list(
    items: Sequence[Item], at_once: int, shown: Callable[[Sequence[Item], int], Sequence[object]]
) -> Iterator[bytes]:
    """A list; `shown` turns some of the items, of which the first has the given index, into what is encoded."""
    yield b"["
    for at in range(0, len(items), at_once):
        yield (b"," if at else b"") + encode(shown(items[at : at + at_once], at))[1:-1]
    yield b"]"


def pieces_of_ids(ids: Sequence[int]) -> Iterator[bytes]:
    """A list of numbers, which may be an array."""
    return pieces_of_list(ids, IDS_AT_ONCE, lambda some, _: list(some))


def pieces_of_text(text: str) -> Iterator[bytes]:
    """A text."""
    yield b'"'
    for at in range(0, len(text), CHARS_AT_ONCE):
        yield encode(text[at : at + CHARS_AT_ONCE])[1:-1]
    yield b'"'


def pieces_of_parts(parts: Iterator[Iterator[bytes]]) -> Iterator[bytes]:
    """A list of what is in pieces itself."""
    yield b"["
    for number, part in enumerate(parts):
        if number:
            yield b","
        yield from part
    yield b"]"

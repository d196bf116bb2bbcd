"""Sets of characters, and regular expressions for how JSON strings may spell them (RFC 8259, section 7).

A character is written as it is, by a short escape, or by its UTF-16 code units as \\uXXXX in hexadecimal digits of
either case; surrogates come only in pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

CharacterSet: TypeAlias = tuple[tuple[int, int], ...]  # ranges of code points, in order, apart from one another

_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_BARE = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST))  # what a JSON string has as it is
# Characters of ASCII that writers of JSON escape: as the grammar says, for HTML, or out of caution.
_OFTEN_ESCAPED = frozenset("\"\\/<>&'+=`\x7f")
_HEX = "0123456789abcdef"


def character_set(ranges: Iterable[tuple[int, int]]) -> CharacterSet:
    """The union of ranges, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return _common(tuple(merged), ((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST)))


def complement(members: CharacterSet) -> CharacterSet:
    """All characters that are not in the set."""
    found, at = [], 0
    for low, high in members:
        if at < low:
            found.append((at, low - 1))
        at = high + 1
    if at <= _LAST:
        found.append((at, _LAST))
    return character_set(found)


def _common(left: CharacterSet, right: CharacterSet) -> CharacterSet:
    found = []
    for low, high in left:
        for other_low, other_high in right:
            if max(low, other_low) <= min(high, other_high):
                found.append((max(low, other_low), min(high, other_high)))
    return tuple(sorted(found))


ALL = character_set([(0, _LAST)])


def contains(members: CharacterSet, character: str) -> bool:
    """Whether the character is in the set."""
    code = ord(character)
    return any(low <= code <= high for low, high in members)


def one(character: str) -> CharacterSet:
    """The set of one character."""
    return ((ord(character), ord(character)),)


def rust_class(members: CharacterSet) -> str:
    """A class of the regular expressions of the grammar library."""
    return f"[{''.join(_rust_range(low, high) for low, high in members)}]"


def _rust_range(low: int, high: int) -> str:
    return _rust_character(low) if low == high else f"{_rust_character(low)}-{_rust_character(high)}"


def _rust_character(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"


@lru_cache(maxsize=1024)
def spelled(members: CharacterSet) -> str:
    """An expression for one character of the set in any spelling; empty for the empty set."""
    plain = _common(members, _BARE)
    short = [escape for character, escape in _SHORT.items() if contains(members, character)]
    units = [(low, min(high, 0xFFFF)) for low, high in members if low <= 0xFFFF]
    pairs = [(max(low, 0x10000), high) for low, high in members if high > 0xFFFF]
    escapes = [f"[{''.join(map(_escaped, short))}]"] if short else []
    long = [piece for low, high in units for piece in _hexadecimal(low, high)]
    for low, high in pairs:
        long += _surrogate_pairs(low, high)
    if long:
        escapes.append(f"u(?:{'|'.join(long)})")
    parts = [rust_class(plain)] if plain else []
    if escapes:
        parts.append(f"\\x5c(?:{'|'.join(escapes)})")
    return f"(?:{'|'.join(parts)})" if parts else ""


@lru_cache(maxsize=4096)
def spelled_constant(character: str) -> str:
    """An expression for a character of a constant or a name: as it is where writers of JSON leave it so.

    Text that must come is known ahead only where there is one way to write it.
    """
    if character.isascii() and character.isprintable() and character not in _OFTEN_ESCAPED:
        return _rust_character(ord(character))
    return spelled(one(character))


def _escaped(escape: str) -> str:
    return escape if escape.isalnum() else f"\\x{ord(escape):02x}"


def _surrogate_pairs(low: int, high: int) -> list[str]:
    """Expressions for the hexadecimal digits of pairs, with the escape between them."""
    first, last = (low - 0x10000) >> 10, (high - 0x10000) >> 10
    start, end = low & 0x3FF, high & 0x3FF
    if first == last:
        return [_pairs(first, last, start, end)]
    found = []
    if start:
        found.append(_pairs(first, first, start, 0x3FF))
        first += 1
    if end != 0x3FF:
        found.append(_pairs(last, last, 0, end))
        last -= 1
    return [*found, _pairs(first, last, 0, 0x3FF)] if first <= last else found


def _pairs(first: int, last: int, start: int, end: int) -> str:
    leads = "|".join(_hexadecimal(0xD800 + first, 0xD800 + last))
    trails = "|".join(_hexadecimal(0xDC00 + start, 0xDC00 + end))
    return f"(?:{leads})\\x5cu(?:{trails})"


def _hexadecimal(low: int, high: int, digits: int = 4) -> list[str]:
    """Expressions for the numbers of a range in so many hexadecimal digits."""
    if digits == 0:
        return [""]
    size = 16 ** (digits - 1)
    first, last = low // size, high // size
    if low % size == 0 and high % size == size - 1:
        rest = f"[0-9a-fA-F]{{{digits - 1}}}" if digits > 1 else ""
        return [_digits(first, last) + rest]
    if first == last:
        return [_digits(first, first) + rest for rest in _hexadecimal(low % size, high % size, digits - 1)]
    found = []
    if low % size:
        found += [_digits(first, first) + rest for rest in _hexadecimal(low % size, size - 1, digits - 1)]
        first += 1
    tail = []
    if high % size != size - 1:
        tail = [_digits(last, last) + rest for rest in _hexadecimal(0, high % size, digits - 1)]
        last -= 1
    if first <= last:
        found += _hexadecimal(first * size, last * size + size - 1, digits)
    return found + tail


def _digits(first: int, last: int) -> str:
    """A class of hexadecimal digits in both cases."""
    members = _HEX[first : last + 1]
    if len(members) == 1 and members.isdigit():
        return members
    numbers = [each for each in members if each.isdigit()]
    letters = [each for each in members if each.isalpha()]
    found = "-".join(dict.fromkeys((numbers[0], numbers[-1]))) if numbers else ""
    for case in (str.lower, str.upper):
        if letters:
            found += case(letters[0]) if len(letters) == 1 else f"{case(letters[0])}-{case(letters[-1])}"
    return f"[{found}]"

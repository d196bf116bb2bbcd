"""A strict JSON parser, and an encoder that yields pieces.

Large texts are processed in pieces of about a millisecond each, so that other threads can run. msgspec decodes 8 MiB
without letting any of them run for 60 to 690 ms, and a list of its raw values for longer: it serves for pieces alone.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar, cast

import msgspec

from quire_server.errors import BadRequest, ClientGone
from quire_server.http.body_limits import Bytes

MAX_DEPTH = 64
MAX_NUMBER_CHARS = 40  # enough for any double or 64-bit integer; fields check their own ranges

# Every string literal, closed or not: possessive, so that no input makes it scan a byte twice.
_STRING = re.compile(r'"(?:[^"\\]++|\\.|\\\Z)*+"?', re.DOTALL)
_NOT_BRACKET = re.compile(r"[^\[\]{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_text(text: str) -> object:
    """The value of a whole JSON text. Raises BadRequest.

    Stricter than the standard parser: at most 64 levels deep, no duplicate keys, no NaN or Infinity, no number of
    thousands of digits, no lone surrogates. Takes time in proportion to the text.
    """
    try:
        return decode_text(text)
    except json.JSONDecodeError as error:
        raise invalid_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None


def decode_text(text: str) -> object:
    """Decode like `parse_text`, but raise json.JSONDecodeError for invalid JSON, for callers that report the place."""
    _check_depth(text)
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise invalid_json("nested too deeply") from None
    if _SURROGATE_ESCAPE.search(text):
        _check_surrogates(value)
    return value


def invalid_json(reason: str) -> BadRequest:
    return BadRequest(f"The body is not valid JSON: {reason}.", code="invalid_json")


def too_deep() -> BadRequest:
    return invalid_json(f"brackets that do not match, or more than {MAX_DEPTH} levels deep")


def duplicate_key(key: str) -> BadRequest:
    return BadRequest(f"The key '{short(key)}' occurs twice.", param=short(key), code="duplicate_key")


def short(text: str, limit: int = 64) -> str:
    """A client's text cut to a length that an error may show."""
    cleaned = text.encode("utf-8", "replace").decode("utf-8")
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def _check_depth(text: str) -> None:
    """Counts brackets; the parser itself finds those that do not match, before any that this counts wrongly."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    brackets = _NOT_BRACKET.sub("", _STRING.sub("", text))
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MAX_DEPTH:
        raise too_deep()


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise duplicate_key(key)
            seen.add(key)
    return result


def _refuse_constant(name: str) -> object:
    raise invalid_json(f"{name} is not a JSON number")


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARS:
        raise invalid_json(f"a number of more than {MAX_NUMBER_CHARS} characters")
    return int(digits)


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise invalid_json("a number beyond the range of a double")
    return value


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid_json("a lone surrogate escape, which is no character") from None


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys,
    parse_constant=_refuse_constant,
    parse_int=_bounded_int,
    parse_float=_finite_float,
)


PIECE_BYTES = 32 << 10
MAX_BRACKETS = 32_768  # arrays and objects: several times as many as 4,096 messages with parts, or 128 large tools have
MAX_KEYS = 65_536

# All possessive, so that no input makes them scan a byte twice.
_STRING_BYTES = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_WHOLE_STRINGS = re.compile(rb'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_UNTIL_COMMA = re.compile(rb'(?:[^",]*+(?:"(?:[^"\\]++|\\.)*+"[^",]*+)*+,)*+', re.DOTALL)

_OPEN = {ord("["): ord("]"), ord("{"): ord("}")}
_OBJECT = ord("{")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_MANY_DIGITS = b"0" * MAX_NUMBER_CHARS
# An integer of more characters; a fraction or an exponent makes a double of as many digits, which is allowed.
_LONG_INTEGER = re.compile(
    rb"(?<![0-9.eE+-])(?:-[0-9]{%d}|[0-9]{%d})[0-9]*+(?![.eE])" % (MAX_NUMBER_CHARS, MAX_NUMBER_CHARS + 1)
)
_SMALL_PIECES = 2  # a document of so many pieces' size is small enough for the parser that is strict and slow


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLimits:
    """Limits on the contents of a document."""

    max_values: int  # values in arrays and objects
    max_keys: int = MAX_KEYS
    max_brackets: int = MAX_BRACKETS


def parse_pieces(
    raw: Bytes, limits: JsonLimits, *, stopped: Callable[[], bool] = lambda: False, piece_bytes: int = PIECE_BYTES
) -> object:
    """The value of a JSON text in UTF-8, parsed in pieces. Raises BadRequest; ClientGone once `stopped`.

    A parser in C holds the GIL until it returns. So the text is cut after commas outside of strings. Each piece is made
    a document of its own by the brackets that are open around it, parsed, and joined to the pieces before it. Values
    and refusals are those of `parse_text`. A document with too many values, keys or brackets is refused when they have
    been counted, before they are built.
    """
    return _Document(raw, limits, piece_bytes).parse(stopped)


class _Document:
    """A text, the counts of the part that was scanned, and the value of the part that was built."""

    def __init__(self, raw: Bytes, limits: JsonLimits, piece_bytes: int) -> None:
        self._raw = raw
        self._limits = limits
        self._piece_bytes = piece_bytes
        self._open = bytearray()  # brackets that are open at the end of the scanned part
        self._num_brackets = self._num_keys = self._num_commas = 0
        self._key = secrets.token_hex(
            16
        )  # the key of the open value in the objects around a piece; random, so that no client can use it

    def parse(self, stopped: Callable[[], bool]) -> object:
        root: object = None
        start = 0
        while True:
            if stopped():
                raise ClientGone
            around = bytes(self._open)
            end, bare = self._next_piece(start)
            is_last = end == len(self._raw) and not bare.endswith(b",")
            if not is_last:
                bare = bare[:-1]  # without the comma
            if start > 0 and not around:
                raise invalid_json(f"more than one value, at byte {start}")
            self._check_ends(bare, start, is_last=is_last)
            value = self._decode(self._raw[start : end if is_last else end - 1], bare, around, start)
            if start == 0:
                root = value
            else:
                self._join(root, value, around)
            if is_last:
                return root
            start = end

    # -- Scanning

    def _next_piece(self, start: int) -> tuple[int, bytes]:
        """The end of the piece, and the piece without the contents of its strings. Counts it."""
        raw, at = self._raw, start
        bare: list[bytes] = []
        cut = 0
        while at < len(raw) and not cut:
            window = min(at + self._piece_bytes, len(raw))
            if raw.find(b'"', at, window) < 0:  # most of a large array is numbers
                cut = raw.rfind(b",", at, window) + 1
                end = cut or window
                bare.append(raw[at:end])
            else:
                end = _end(_UNTIL_COMMA, raw, at, window)
                cut = end if end > at else 0
                end = cut or _end(_WHOLE_STRINGS, raw, at, window)
                bare.append(_STRING_BYTES.sub(b'""', raw[at:end]))
            self._count(bare[-1])
            if end < window and not cut:  # a string that continues after the window
                end = self._end_of_string(end)
                bare.append(b'""')
            at = end
        return at, b"".join(bare)

    def _end_of_string(self, start: int) -> int:
        raw, at = self._raw, start + 1
        while at + 1 < len(raw) or raw[at : at + 1] == b'"':
            at = _end(_IN_STRING, raw, at, min(at + self._piece_bytes, len(raw)))
            if raw[at : at + 1] == b'"':
                return at + 1
        raise invalid_json(f"a string that does not end, at byte {start}")

    def _count(self, bare: bytes) -> None:
        limits = self._limits
        self._num_commas += bare.count(b",")
        self._num_keys += bare.count(b":")
        self._num_brackets += bare.count(b"[") + bare.count(b"{")
        if b"\\" in bare:
            raise invalid_json("a backslash outside of a string")
        for bracket in bare.translate(None, _NOT_BRACKETS):
            if bracket in _OPEN:
                self._open.append(bracket)
                if len(self._open) > MAX_DEPTH:
                    raise too_deep()
            elif not self._open or _OPEN[self._open.pop()] != bracket:
                raise too_deep()
        for what, number, most in (
            ("values", self._num_commas, limits.max_values),
            ("keys", self._num_keys, limits.max_keys),
            ("arrays and objects", self._num_brackets, limits.max_brackets),
        ):
            if number > most:
                raise BadRequest(f"The body has more than {most} {what}.", code="too_many_values")

    def _check_ends(self, bare: bytes, start: int, *, is_last: bool) -> None:
        """Refuse a comma without a value at an end of the piece, which the brackets around it would hide."""
        text = bare.strip(b" \t\r\n")
        if is_last and self._open:
            raise too_deep()
        if start > 0 and text[:1] in (b"", b"]", b"}"):
            raise invalid_json(f"no value behind the comma, before byte {start + 1}")
        if not is_last and (not self._open or text[-1:] in (b"", b"[", b"{")):
            raise invalid_json(f"no value before a comma, behind byte {start}")

    # -- Building

    def _decode(self, text: bytes, bare: bytes, around: bytes, start: int) -> object:
        key = b'"%b":' % self._key.encode()
        before = b"".join(
            b"%c%b" % (bracket, key if bracket == _OBJECT and level < len(around) else b"")
            for level, bracket in enumerate(around, start=1)
        )
        whole = before + text + bytes(_OPEN[bracket] for bracket in reversed(self._open))
        is_small = len(whole) <= _SMALL_PIECES * self._piece_bytes
        # The search costs more than the look for digits, which few bodies have so many of.
        has_long_number = _MANY_DIGITS in bare.translate(_DIGITS_AS_ZEROS) and bool(_LONG_INTEGER.search(bare))
        try:
            if not is_small or not (b":" in bare or has_long_number):
                try:
                    value = cast(object, msgspec.json.decode(whole))
                except msgspec.DecodeError:
                    if not is_small:
                        raise invalid_json(f"a fault behind byte {start}") from None
                else:
                    if has_long_number:
                        raise invalid_json(f"a number of more than {MAX_NUMBER_CHARS} characters")
                    if b":" in bare and _num_pairs(value) != bare.count(b":") + before.count(key):
                        raise BadRequest("A key occurs twice.", code="duplicate_key")
                    return value
            return decode_text(whole.decode("utf-8"))  # strict about keys and numbers, with good error messages
        except UnicodeDecodeError:
            raise invalid_json(f"not UTF-8 behind byte {start}") from None
        except json.JSONDecodeError as error:
            raise invalid_json(f"{error.msg} behind byte {start}") from None

    def _join(self, root: object, value: object, around: bytes) -> None:
        """Add the value of a piece, nested in the open brackets, to the value of the pieces before it."""
        for level, bracket in enumerate(around, start=1):
            goes_on = level < len(around)
            if bracket == _OBJECT:
                known, new = cast(dict[str, object], root), cast(dict[str, object], value)
                if goes_on:
                    root, value = next(reversed(known.values())), new.pop(self._key)
                if twice := known.keys() & new.keys():
                    raise duplicate_key(min(twice))
                known.update(new)
            else:
                items, more = cast(list[object], root), cast(list[object], value)
                if goes_on:
                    root, value = items[-1], more.pop(0)
                items.extend(more)


def _end(pattern: re.Pattern[bytes], raw: Bytes, start: int, end: int) -> int:
    """The end of the match that begins at `start`; the patterns also match the empty string."""
    match = pattern.match(raw, start, end)
    return start if match is None else match.end()


def _num_pairs(value: object) -> int:
    """The number of keys of all objects in a value."""
    total = 0
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            total += len(each)
            todo.extend(each.values())
        elif isinstance(each, list):
            todo.extend(each)
    return total


Item = TypeVar("Item")

IDS_AT_ONCE = 1 << 14
CHARS_AT_ONCE = 1 << 16

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Pieces:
    """A value in encoded parts, perhaps encoded on demand; each part takes a few milliseconds at most."""

    parts: Iterator[bytes]


def pieces_of_object(fields: Mapping[str, object], *, begin: bytes = b"{", end: bytes = b"}") -> Iterator[bytes]:
    """An object, of whose values some may be `Pieces`; the others are encoded at once.

    The joined pieces are the JSON of the whole object. With another `begin` or `end` they are a part of a larger
    object.
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
    """A list; `shown` turns items, the first of which has the given index, into values to encode."""
    yield b"["
    for at in range(0, len(items), at_once):
        yield (b"," if at else b"") + encode(shown(items[at : at + at_once], at))[1:-1]
    yield b"]"


def pieces_of_ids(ids: Sequence[int]) -> Iterator[bytes]:
    """A list of numbers; `ids` may be an array."""
    return pieces_of_list(ids, IDS_AT_ONCE, lambda some, _: list(some))


def pieces_of_text(text: str) -> Iterator[bytes]:
    """A string."""
    yield b'"'
    for at in range(0, len(text), CHARS_AT_ONCE):
        yield encode(text[at : at + CHARS_AT_ONCE])[1:-1]
    yield b'"'


def pieces_of_parts(parts: Iterator[Iterator[bytes]]) -> Iterator[bytes]:
    """A list whose items are in pieces."""
    yield b"["
    for number, part in enumerate(parts):
        if number:
            yield b","
        yield from part
    yield b"]"

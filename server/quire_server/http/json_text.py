"""JSON text to Python values, strictly: what the standard parser lets pass and clients must not send is refused.

Promises: at most 64 levels deep, no duplicate keys, no NaN or Infinity, no number of thousands of digits, no lone
surrogates; time in proportion to the text. Must not know: routes, what the values mean, how long a text may be.
"""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate

from quire_server.errors import BadRequest

MAX_DEPTH = 64
MAX_NUMBER_CHARS = 40  # any double or 64-bit integer fits; the fields' own ranges do the rest

# Every string literal, closed or not: possessive, so that no input makes it scan a byte twice.
_STRING = re.compile(r'"(?:[^"\\]++|\\.|\\\Z)*+"?', re.DOTALL)
_NOT_BRACKET = re.compile(r"[^\[\]{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_text(text: str) -> object:
    """The value of a whole JSON text. Raises BadRequest."""
    try:
        return decode_text(text)
    except json.JSONDecodeError as error:
        raise invalid_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None


def decode_text(text: str) -> object:
    """As `parse_text`, but raises json.JSONDecodeError where the text is not JSON: who cut it knows the place."""
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
    """At most so much of a client's text as an error may show."""
    cleaned = text.encode("utf-8", "replace").decode("utf-8")
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def _check_depth(text: str) -> None:
    """Brackets that do not match are the parser's to find: it stops there, and what it has seen was counted right."""
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

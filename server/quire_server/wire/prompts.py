"""Texts and token ids in the forms that OpenAI's API takes them: one or a list, text or ids.

Promises: what validates is a non-empty list of at most as many as are allowed, all texts or all lists of ids.
Must not know: what is done with them, the vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

from pydantic import PlainValidator, WithJsonSchema

Prompts = list[str] | list[list[int]]

_MAX_ID = 2**31 - 1
_PIECE = 16_384  # ids that are looked at in one go
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MAX_ID}, "minItems": 1}


def one_or_many(most: int, what: str) -> tuple[Any, Any]:
    """The marks of a field of type `Prompts` that holds at most `most` of `what` ("prompts")."""
    texts = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": most}
    lists = {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": most}
    schema = {"anyOf": [{"type": "string"}, texts, _TOKENS, lists]}
    return PlainValidator(lambda value: _check(value, most, what)), WithJsonSchema(schema)


def _check(value: object, most: int, what: str) -> Prompts:
    """All four forms, as a list of prompts. By hand: a union would report a wrong item once per form and item, and look
    at a million ids in one go, with which no other thread could run.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("expected a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise ValueError("must not be empty")
    first = value[0]
    if type(first) is int:
        return [_check_ids(value)]
    if len(value) > most:
        raise ValueError(f"at most {most} {what} per request")
    if isinstance(first, str):
        texts = [item for item in value if isinstance(item, str)]
        if len(texts) == len(value):
            return texts
    elif isinstance(first, list):
        lists = [_check_ids(item) for item in value if isinstance(item, list)]
        if len(lists) == len(value):
            return lists
    raise ValueError("the items must be all strings, all token ids or all lists of token ids")


def _check_ids(ids: list[object]) -> list[int]:
    """By operations on whole lists, since a prompt may have a million ids, and some thousand of them at a time."""
    if not ids:
        raise ValueError("a prompt must have at least one token")
    for start in range(0, len(ids), _PIECE):
        piece = cast(list[int], ids[start : start + _PIECE])
        if set(map(type, piece)) != {int}:
            raise ValueError("token ids must be integers")
        if min(piece) < 0 or max(piece) > _MAX_ID:
            raise ValueError("token ids must be those of the vocabulary")
    return cast(list[int], ids)

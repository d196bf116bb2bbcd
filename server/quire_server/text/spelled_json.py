"""JSON whose numbers keep their spelling: what is read and written again has the digits that a client sent.

Must not know: requests, models. The process of a chat template imports it.
"""

from __future__ import annotations

import json
import re
import secrets


class _Spelled:
    """A number with the text that it was read from."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class _Float(_Spelled, float):
    """A float that another text would stand for, such as 1.10 or 1e400."""


class _Int(_Spelled, int):
    """An integer that another text would stand for: -0."""


def read(text: str | bytes) -> object:
    """The value; a number whose usual text is another one is written as it was spelled. Raises ValueError,
    RecursionError.
    """
    return json.loads(text, parse_float=_float, parse_int=_int)


def write(
    value: object,
    *,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The JSON of a value, as `json.dumps` writes it but for the spelling of numbers. Raises as `json.dumps`."""
    mark, numbers = f"Xq7{secrets.token_hex(8)}:", list[str]()
    text = json.dumps(
        _marked(value, mark, numbers),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return re.sub(f'"{mark}([0-9]+)"', lambda found: numbers[int(found[1])], text) if numbers else text


def _float(text: str) -> float:
    value = float(text)
    return value if repr(value) == text else _Float(text)


def _int(text: str) -> int:
    value = int(text)
    return value if value or text == "0" else _Int(text)


def _marked(value: object, mark: str, numbers: list[str]) -> object:
    """A copy with a marked text in place of each spelled number, whose texts are added to `numbers`."""
    if isinstance(value, dict):
        return {key: _marked(each, mark, numbers) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(each, mark, numbers) for each in value]
    if not isinstance(value, _Spelled):
        return value
    numbers.append(value.text)
    return f"{mark}{len(numbers) - 1}"

"""How many parts all messages of a request may have together, counted before one of them is looked at.

Promises: counting costs microseconds for each message, whatever it holds. Must not know: what parts say.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BeforeValidator

MAX_PARTS_IN_ALL = 8192
_MOST_MESSAGES = 4096  # more are refused anyway


def _check(messages: object) -> object:
    if isinstance(messages, list) and len(messages) <= _MOST_MESSAGES:
        num_parts = 0
        for content in _contents(messages):
            num_parts += len(content)
            if num_parts > MAX_PARTS_IN_ALL:
                raise ValueError(f"at most {MAX_PARTS_IN_ALL} content parts in all messages")
    return messages


def _contents(messages: list[object]) -> Iterator[list[object]]:
    """The lists of parts of messages and items, then those inside parts, such as a tool's result."""
    outer = [content for message in messages for content in _lists_of(message)]
    yield from outer
    for content in outer:
        for part in content:
            yield from _lists_of(part)


def _lists_of(value: object) -> list[list[object]]:
    if not isinstance(value, dict):
        return []
    found = (value.get(name) for name in ("content", "tool_calls", "output", "summary"))
    return [each for each in found if isinstance(each, list)]


FEW_PARTS = BeforeValidator(_check)

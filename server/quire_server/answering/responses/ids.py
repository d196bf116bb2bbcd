"""The ids of responses and of their items.

Promises: nobody can guess a response's id, and an item's id says which response it belongs to. Must not know: what the
items are.
"""

from __future__ import annotations

import secrets

_STEM_CHARS = 48


def new_stem() -> str:
    """What a response's id and those of its items have in common."""
    return secrets.token_hex(_STEM_CHARS // 2)


def response_id(stem: str) -> str:
    return f"resp_{stem}"


def item_id(prefix: str, stem: str, number: int, *, of_input: bool = False) -> str:
    return f"{prefix}_{stem}{'i' if of_input else 'o'}{number}"


def response_of(item: str) -> str:
    """The id of the response that an item's id was made for."""
    return response_id(item.partition("_")[2][:_STEM_CHARS])

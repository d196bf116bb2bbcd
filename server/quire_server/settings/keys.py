"""API keys as operators write them: `KEY`, `NAME=KEY`, `=KEY`, or a file with one of these a line.

Promises: a key is never printed, a name may be; what could be misread as a name is refused, never taken to be a shorter
key. Must not know: how clients bring keys.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LEAST_NAMED = 8  # characters of a key after a name: with less, the part before the equal sign was the better half
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key, and the name by which the log may call whoever has it."""

    name: str = ""
    key: str = field(repr=False)


def parse_key(text: str) -> ApiKey:
    """`NAME=KEY` has a name; `=KEY` and everything else is the key itself. Raises ValueError.

    Equal signs at the end are base64's, so `c2VjcmV0==` is a key; one that has them elsewhere is written `=KEY`.
    """
    name, equals, key = text.partition("=")
    if not text.strip() or (equals and not name and not key):
        raise ValueError("an API key is empty; give the flag a non-empty value or leave it out")
    if not name:
        return ApiKey(key=key)
    if not key.strip("=") or not _NAME.fullmatch(name):
        return ApiKey(key=text)
    if len(key) < LEAST_NAMED:
        raise ValueError(
            f"an API key is written NAME=KEY with less than {LEAST_NAMED} characters for the key;"
            " take a longer one, or write =KEY for a key that has an equal sign in it"
        )
    return ApiKey(name=name, key=key)


def read_keys(path: Path, flag: str = "--api-key-file") -> Iterator[ApiKey]:
    """The keys of a file: one a line; lines that are empty or begin with # do not count. Raises ValueError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text in UTF-8"
        raise ValueError(f"{flag} {path}: cannot be read: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{flag} {path}: there is no key in it")
    yield from map(parse_key, keys)


def readable_by_others(path: Path) -> bool:
    """Whether every user of this machine can read the file."""
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False

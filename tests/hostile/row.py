"""One thing that a hostile or careless client does to a server, as a command: `python -m hostile.rows NAME`.

Promises: a row runs against a server of its own and prints what happened; what breaks a promise is an AssertionError.
Must not know: other rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from e2e.served import Served


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table that the command prints."""

    name: str
    what: str  # arrives, in a few words
    act: Callable[[Served], Awaitable[str]]  # what happened, with its figures
    flags: tuple[str, ...] = ()  # of `quire serve`
    limits: str = ""  # of `Served`
    has_folder: bool = False  # the server runs in an empty folder, which is deleted

"""A tool call as a reply shows it, whole or in pieces.

Promises: all pieces with one index add up to one call.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class CallDelta:
    """The new part of one call. The first piece has its id and its name, the others more of its arguments."""

    index: int  # the call's index in its reply, from 0
    id: str | None = None
    name: str | None = None
    arguments: str = ""  # a piece of JSON text

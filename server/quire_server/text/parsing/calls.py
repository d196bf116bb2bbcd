"""A call of a tool as a reply shows it, whole or in pieces.

Promises: all pieces of one index joined are one call.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class CallDelta:
    """What is new of one call. The first piece has its id and its name, the others more of its arguments."""

    index: int  # of the call in its reply, from 0
    id: str | None = None
    name: str | None = None
    arguments: str = ""  # a piece of JSON text

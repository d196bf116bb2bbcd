"""Whom of those who wait a step asks first.

Promises: all who wait, each once; that the last are served in bounded time is the elder rule's work. Must not know:
blocks, budgets, what is running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from quire_engine.scheduling.sequence import Group


class QueuePolicy(Protocol):
    """Arranges the queue anew in every step; it is handed in the order of `OrderPolicy`."""

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]: ...


class AsOrdered:
    """As the queue stands."""

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]:  # noqa: ARG002
        return list(waiting)  # a copy: whoever enters leaves the queue

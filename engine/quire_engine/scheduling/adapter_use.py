"""How many groups have each adapter, kept up to date with each change of a group's state.

Promises: every answer takes the same time, however many groups there are. Must not know: sequences, blocks.
"""

from __future__ import annotations

from collections.abc import Collection

from quire_engine.contract.invariants import require
from quire_engine.contract.types import AdaptersInUse


class AdapterUse:
    """The adapters of the live groups, by state. Groups without one, whose digest is empty, do not count."""

    def __init__(self) -> None:
        self._active: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self.in_use = AdaptersInUse(self._active.keys(), self._held.keys())  # follows every change
        self.running: Collection[str] = self._running.keys()  # digests, who began first; this one too

    def join(self, digest: str) -> None:
        """A group waits that was not there, or was held."""
        _change(self._active, digest, 1)

    def leave(self, digest: str) -> None:
        """A waiting group has ended, or is held."""
        _change(self._active, digest, -1)

    def enter(self, digest: str) -> None:
        """A waiting group runs."""
        _change(self._running, digest, 1)

    def stop(self, digest: str) -> None:
        """A running group waits."""
        _change(self._running, digest, -1)

    def hold(self, digest: str) -> None:
        """A waiting group is set aside."""
        self.leave(digest)
        _change(self._held, digest, 1)

    def release(self, digest: str) -> None:
        """A group that was set aside is so no more: it has ended, or will join."""
        _change(self._held, digest, -1)

    def waiting_for_room(self, most: int) -> Collection[str]:
        """Digests of waiting groups alone, where `most` others run already."""
        if len(self._running) < most or len(self._active) == len(self._running):
            return ()
        return self._active.keys() - self._running.keys()

    def check(self, *, running: Collection[str], waiting: Collection[str], held: Collection[str]) -> None:
        """Raise InvariantViolation unless these are the digests of all groups in each state."""
        require(set(running) - {""} == set(self._running), "the adapters of running groups are miscounted")
        require({*running, *waiting} - {""} == set(self._active), "the adapters of active groups are miscounted")
        require(set(held) - {""} == set(self._held), "the adapters of held groups are miscounted")


def _change(counts: dict[str, int], digest: str, by: int) -> None:
    if not digest:
        return
    left = counts.get(digest, 0) + by
    if left:
        counts[digest] = left
    else:
        del counts[digest]

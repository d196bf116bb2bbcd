"""Copies of blocks between the device's pool and the host's, until a step takes them along.

Owns the host pool. Promises: a content is read from the host only if it is there when the step's copies are made, in
the order out, then in; what a copy reads is not reused before. Must not know: sequences, who wants a block, bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire_engine.invariants import require
from quire_engine.scheduling.host_pool import HostPool
from quire_engine.scheduling.moves import NO_MOVES, Moves

_PRIVATE = b"private "  # how keys begin that name no content: nobody else can ask for them


class HostTier:
    """What a step's plan moves to the host and from it."""

    def __init__(self, num_blocks: int, stored: Iterable[bytes] = ()) -> None:
        """`stored`: what blocks 0, 1, ... hold already, the least recently wanted first."""
        self.pool = HostPool(num_blocks)
        for key in stored:
            self.pool.store(key)
        self.total_out = self.total_in = 0
        self._out: dict[int, tuple[int, bytes]] = {}  # host block -> device block, key
        self._arriving: dict[int, bytes] = {}  # device block -> key
        self._held: list[bytes] = []  # claimed until the copies are on their way
        self._num_private = 0

    def private_key(self) -> bytes:
        """A new key for a block that only its sequence can use."""
        self._num_private += 1
        return _PRIVATE + self._num_private.to_bytes(8, "big")

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The host blocks of the longest run of stored keys from the first on, as far as they can be held."""
        found: list[int] = []
        room = self.pool.num_room
        for key in keys:
            if not self.pool.holds(key):
                break
            room -= not self.pool.is_claimed(key)
            if room < 0:
                break
            found.append(self.pool.block(key))
        return found

    def claim(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.pool.claim(key)

    def drop(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.pool.drop(key, keep=not key.startswith(_PRIVATE))

    def hold(self, keys: Sequence[bytes]) -> None:
        """Take over claims, for as long as copies of these keys may be asked for in this plan."""
        self._held += keys

    def arriving(self, block: int) -> bytes | None:
        """The key whose content a device block is to get, if its copy was not taken along yet."""
        return self._arriving.get(block)

    def evict(self, key: bytes, block: int) -> None:
        """A matchable device block is about to be written anew."""
        if self.pool.holds(key):  # so it is with every block whose content has not arrived
            self.pool.touch(key)
        else:
            self.save(key, block)

    def save(self, key: bytes, block: int) -> None:
        """Copy a device block out, if there is room for the key."""
        require(block not in self._arriving, f"block {block} is copied out before its content has come in")
        target = self.pool.store(key)
        if target is not None:
            self._out[target] = block, key

    def bring(self, key: bytes, block: int) -> None:
        """Copy a stored key in; it must be held."""
        require(self.pool.holds(key) and key in self._held, "a block is to come from the host that is not there")
        self._arriving[block] = key

    def forget(self, block: int) -> None:
        """A device block is handed out for writing: nothing needs to arrive in it."""
        self._arriving.pop(block, None)

    def is_claimed(self, key: bytes) -> bool:
        """Whether a swapped sequence will go on with it."""
        return self.pool.is_claimed(key)

    def forget_unclaimed(self) -> tuple[int, ...]:
        """Nobody will find what is kept for nobody in particular; the host blocks that held it."""
        blocks = self.pool.forget_unclaimed()
        for block in blocks:
            self._out.pop(block, None)  # its copy is not wanted any more
        return blocks

    def take(self) -> Moves:
        """The copies since the last call."""
        if not (self._out or self._arriving or self._held):
            return NO_MOVES
        out = tuple((block, target) for target, (block, _) in self._out.items())
        keys = tuple(b"" if key.startswith(_PRIVATE) else key for _, key in self._out.values())
        into = tuple((self.pool.block(key), block) for block, key in self._arriving.items())
        self.total_out += len(out)
        self.total_in += len(into)
        self._out, self._arriving = {}, {}
        held, self._held = self._held, []
        self.drop(held)
        return Moves(out, into, keys)

    def check(self, claimed: Iterable[bytes]) -> None:
        """Raise InvariantViolation unless every claim is a swapped sequence's, or held for copies to come."""
        self.pool.check([*claimed, *self._held])

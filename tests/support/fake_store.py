"""A `BlockStore` in a dict, over a `FakeExecutor`'s pool: it writes late, reads slowly and loses some, by its dice.

Promises: what it writes is what the block holds at that moment, so that a block that was given away without `lose` is
read as something else, and raises `CorruptKV`. Must not know: the scheduler.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence

from quire_engine.contract.block_store import StoreCounts
from support.fake_executor import FakeExecutor


class FakeStore:
    def __init__(self, dice: random.Random, block_size: int, kept: dict[bytes, bytes]) -> None:
        """`kept`: contents by key, which outlive it."""
        self.kept = kept
        self.executor: FakeExecutor | None = None
        self.seconds_per_block = 0.0
        self.offered: list[tuple[bytes, int]] = []  # all that ever were: key, depth
        self.used: list[bytes] = []
        self.emptied = 0
        self._dice, self._block_size = dice, block_size
        self._writes: dict[bytes, int] = {}
        self._reads: list[list[bytes]] = []
        self._written = self._read = self._dropped = self._refused = 0

    @property
    def counts(self) -> StoreCounts:
        return StoreCounts(
            blocks=len(self.kept),
            written=self._written,
            read=self._read,
            dropped=self._dropped,
            refused=self._refused,
        )

    def tick(self) -> None:
        """Time passes: some of what waits is written."""
        assert self.executor is not None
        for key, block in list(self._writes.items()):
            if self._dice.random() < 0.06:
                del self._writes[key]
                slots = [self.executor.slots.get((block, offset)) for offset in range(self._block_size)]
                self.kept[key] = json.dumps(slots).encode()
                self._written += 1

    def holds(self, key: bytes) -> bool:
        return key in self.kept

    def use(self, keys: Sequence[bytes]) -> None:
        self.used += keys

    def offer(self, key: bytes, block: int, depth: int) -> None:
        self.offered.append((key, depth))
        if key not in self.kept:
            self._writes[key] = block

    def lose(self, key: bytes) -> None:
        self._dropped += self._writes.pop(key, None) is not None

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._writes.pop(key, None)
            self.kept.pop(key, None)

    def clear(self) -> int:
        self.emptied += 1
        count = len(self.kept)
        self._writes.clear()
        self.kept.clear()
        return count

    def read(self, keys: Iterable[bytes]) -> None:
        self._reads.append(list(keys))

    def take(self) -> list[tuple[bytes, bytes | None]]:
        taken: list[tuple[bytes, bytes | None]] = []
        while self._reads and self._dice.random() < 0.6:
            keys = self._reads[0]
            payload = self.kept.get(keys[0])
            if payload is None or self._dice.random() < 0.05:
                self._refused += 1
                self.kept.pop(keys[0], None)
                taken += [(key, None) for key in self._reads.pop(0)]
                continue
            self._read += 1
            taken.append((keys.pop(0), payload))
            if not keys:
                del self._reads[0]
        return taken

    def cancel(self) -> None:
        self._reads.clear()

    def wait(self, seconds: float) -> None:
        del seconds

    def place(self, payload: bytes, block: int) -> None:
        assert self.executor is not None
        for offset, held in enumerate(json.loads(payload)):
            self.executor.slots[block, offset] = held

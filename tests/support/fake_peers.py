"""`BlockPeers` over the pools of fake executors: another engine's blocks come when the test says.

Must not know: the scheduler.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from quire_engine.contract.block_store import Payload, TransferCounts
from support.fake_executor import FakeExecutor


class FakePeers:
    """One other engine, `lent`, whose contents are those of its fake pool."""

    def __init__(self, block_size: int) -> None:
        self.executor: FakeExecutor | None = None
        self.offered: dict[bytes, int] = {}
        self.lender: FakePeers | None = None
        self.seconds_per_block = 0.0
        self.fetches: dict[str, list[bytes]] = {}  # what has not come, by name
        self.cancelled: list[str] = []
        self.named = ""
        self._arrived: list[tuple[bytes, Payload | None]] = []
        self._block_size = block_size
        self._received = self._missed = 0

    @property
    def counts(self) -> TransferCounts:
        return TransferCounts(received=self._received, missed=self._missed)

    def block_seconds(self, peer: str) -> float:
        del peer
        return self.seconds_per_block

    def offer(self, key: bytes, block: int) -> None:
        self.offered[key] = block

    def lose(self, key: bytes) -> None:
        self.offered.pop(key, None)

    def clear(self) -> None:
        self.offered.clear()

    def fetch(self, name: str, peer: str, keys: Sequence[bytes], *, is_computed: bool) -> None:
        del peer, is_computed
        assert name not in self.fetches
        self.fetches[name] = list(keys)

    def come(self, name: str, count: int = 1) -> None:
        """So many more blocks of a fetch come."""
        assert self.lender is not None
        assert self.lender.executor is not None
        for _ in range(min(count, len(self.fetches[name]))):
            key = self.fetches[name].pop(0)
            block = self.lender.offered[key]
            slots = [self.lender.executor.slots.get((block, offset)) for offset in range(self._block_size)]
            self._arrived.append((key, repr(slots).encode()))
            self._received += 1

    def miss(self, name: str) -> None:
        """Nothing more of a fetch comes."""
        self._missed += len(self.fetches[name])
        self._arrived += [(key, None) for key in self.fetches[name]]
        self.fetches[name] = []

    def take(self) -> list[tuple[bytes, Payload | None]]:
        taken, self._arrived = self._arrived, []
        return taken

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)
        self._missed += len(self.fetches.pop(name))

    def wait(self, seconds: float) -> None:
        del seconds

    def place(self, payload: Payload, block: int) -> None:
        assert self.executor is not None
        for offset, held in enumerate(ast.literal_eval(bytes(payload).decode())):
            self.executor.slots[block, offset] = held

    def name_model(self, digest: str) -> None:
        self.named = digest

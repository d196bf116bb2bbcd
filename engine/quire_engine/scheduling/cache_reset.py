"""Forgets on an operator's order what the prefix cache knows: in the pool, on the host and, by the host's, on disk.

Promises: who runs or is swapped out keeps what it has and its tokens; from then on nobody else finds it, and the log
says when, so that a replay does too. Must not know: who asks, frames, how blocks are copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.step_log import StepLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What was known and is no more."""

    num_blocks: int  # of the pool, which nobody held
    host_blocks: tuple[int, ...]  # of the host's memory; what is on disk of them is to go too


class CacheReset:
    """Between two steps."""

    def __init__(self, kv: KVAllocator, log: StepLog | None) -> None:
        self._kv = kv
        self._log = log

    def run(self) -> Dropped:
        if self._log is not None:
            self._log.reset()
        num_blocks, host_blocks = self._kv.forget_cached()
        return Dropped(num_blocks=num_blocks, host_blocks=host_blocks)

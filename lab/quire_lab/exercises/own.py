"""Servers of the embedded model for what a given server cannot show: few slots, or a small pool.

Owns those that were started. Promises: each is started when it is first asked for, and gone when this is left.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from quire_bench.own_server import own_server
from quire_engine.demo import demo_model_path
from quire_lab.facts.live import Live
from quire_lab.simulation.kv_memory import kv_shape

SLOTS = 4
TIGHT_BLOCKS = 64
_NARROW_BLOCKS = 1024
_BLOCK_SIZE = 16
# On a CPU steps are planned one by one, and a request has the same bits alone as in any batch.
_FLAGS = ("--set", "learn=true", "--device", "cpu", "--set", f"block_size={_BLOCK_SIZE}", "--max-num-seqs", str(SLOTS))


class OwnServers:
    """The servers of the embedded model that checks start and pause for themselves: few slots, or a small pool."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._started: dict[tuple[str, ...], Live] = {}

    def narrow(self) -> Live:
        """Four slots and more blocks than they need: whoever waits, waits for a slot."""
        return self._live("--kv-memory", _bytes_of(_NARROW_BLOCKS))

    def tight(self) -> Live:
        """A pool that four requests outgrow, and prompts in chunks of 32 tokens."""
        chunks = ("--max-model-len", "512", "--max-num-batched-tokens", "64", "--prefill-chunk", "32")
        return self._live(*chunks, "--kv-memory", _bytes_of(TIGHT_BLOCKS))

    def _live(self, *flags: str) -> Live:
        """Raises BenchError where it does not start."""
        if flags not in self._started:
            url = self._runner.run(self._stack.enter_async_context(own_server((*_FLAGS, *flags))))
            self._started[flags] = Live(url)
        return self._started[flags]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._stack.aclose())
        finally:
            self._runner.close()


def _bytes_of(blocks: int) -> str:
    return str(blocks * kv_shape(demo_model_path()).bytes_per_block(_BLOCK_SIZE))

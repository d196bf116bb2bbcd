"""What static batching would reserve for the very requests that are served here.

Owns the batches that are still open. Promises: a batch counts once, when its last request has ended. Must not know: how
requests are really batched, the engine, clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.metrics.metric_values import Counter


@dataclass(slots=True, kw_only=True)
class StaticBatch:
    """Requests that a server with static batching would compute together: each keeps its slot until all have ended."""

    size: int = 0  # sequences
    num_open: int = 0  # of those, unfinished ones
    longest: int = 0  # tokens generated for the longest so far
    useful: int = 0  # tokens generated for all so far
    longest_asked: int = 0  # tokens of prompt and output that the longest may come to


class StaticBatching:
    """Puts requests into batches in order of arrival: as many as overlap in time, at most `max_size` sequences.

    That is kinder than real static batching, which would make those wait that arrive while a batch is computed.
    """

    def __init__(self, slots: Counter) -> None:
        self.max_size = 1
        self._slots = slots  # of closed batches, by use: those that held a token, and the padding
        self._last: StaticBatch | None = None
        self._open: list[StaticBatch] = []

    def join(self, n: int, num_tokens: int) -> StaticBatch:
        """A request with n choices arrives; prompt and output of a choice have `num_tokens` tokens at most."""
        batch = self._last
        if batch is None or batch.num_open == 0 or batch.size + n > self.max_size:
            batch = self._last = StaticBatch()
            self._open.append(batch)
        batch.size += n
        batch.num_open += n
        batch.longest_asked = max(batch.longest_asked, num_tokens)
        return batch

    def leave(self, batch: StaticBatch, generated: list[int]) -> None:
        """A request ends, after so many tokens of each of its choices."""
        batch.useful += sum(generated)
        batch.longest = max(batch.longest, *generated)
        batch.num_open -= len(generated)
        if batch.num_open == 0:
            self._open.remove(batch)
            self._slots.inc(batch.useful, "useful")
            self._slots.inc(batch.size * batch.longest - batch.useful, "padding")

    def kv_blocks(self, block_size: int) -> int:
        """Blocks that the oldest open batch would hold: each sequence as many as the longest may need.

        The younger ones would wait for it. The last token of a sequence is never computed, so it needs no slot.
        """
        if not self._open:
            return 0
        oldest = self._open[0]
        return oldest.size * -(-max(oldest.longest_asked - 1, 0) // block_size)

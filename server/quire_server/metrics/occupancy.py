"""The terms of Little's law for sequences, and the slots that static batching would reserve for the same requests."""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.metrics.metric_values import Counter


class Occupancy:
    """Totals since the start. The sequences of a request are in the system until its last one has ended.

    Sequences in the system are counted by the queue's places, their times by the requests' records; so a bug in either
    shows as a difference.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self.departed = 0
        self.seconds_in_system = 0.0  # sum over departed sequences
        self._taken = 0
        self._changed_at = 0.0
        self._sequence_seconds = 0.0

    def occupied(self, now: float, sequences: int) -> None:
        """Note that `sequences` places are taken from now on."""
        self._sequence_seconds = self.sequence_seconds(now)
        self._taken, self._changed_at = sequences, now

    def sequence_seconds(self, now: float) -> float:
        """The taken places, integrated over time."""
        return self._sequence_seconds + self._taken * (now - self._changed_at)

    def arrive(self, n: int) -> None:
        self.accepted += n

    def leave(self, n: int, seconds: float) -> None:
        """The n sequences of a request ended after `seconds`."""
        self.departed += n
        self.seconds_in_system += n * seconds


@dataclass(slots=True, kw_only=True)
class StaticBatch:
    """Requests that static batching would compute together: each keeps its slot until all have ended."""

    size: int = 0  # sequences
    num_open: int = 0  # unfinished sequences
    longest: int = 0  # tokens generated for the longest so far
    useful: int = 0  # tokens generated for all so far
    longest_asked: int = 0  # most tokens of prompt and output of a sequence


class StaticBatching:
    """Assigns requests to batches in order of arrival: those that overlap in time, at most `max_size` sequences.

    A batch counts once, when its last request has ended. Real static batching is worse: requests that arrive while a
    batch is computed would wait for the next one.
    """

    def __init__(self, slots: Counter) -> None:
        self.max_size = 1
        self._slots = slots  # slots of closed batches, by use: tokens and padding
        self._last: StaticBatch | None = None
        self._open: list[StaticBatch] = []

    def join(self, n: int, num_tokens: int) -> StaticBatch:
        """A request with n choices arrives; a choice has at most `num_tokens` tokens of prompt and output."""
        batch = self._last
        if batch is None or batch.num_open == 0 or batch.size + n > self.max_size:
            batch = self._last = StaticBatch()
            self._open.append(batch)
        batch.size += n
        batch.num_open += n
        batch.longest_asked = max(batch.longest_asked, num_tokens)
        return batch

    def leave(self, batch: StaticBatch, generated: list[int]) -> None:
        """A request ends; `generated`: the tokens of each of its choices."""
        batch.useful += sum(generated)
        batch.longest = max(batch.longest, *generated)
        batch.num_open -= len(generated)
        if batch.num_open == 0:
            self._open.remove(batch)
            self._slots.inc(batch.useful, "useful")
            self._slots.inc(batch.size * batch.longest - batch.useful, "padding")

    def kv_blocks(self, block_size: int) -> int:
        """Blocks that the oldest open batch would hold: each sequence as many as the longest may need.

        The younger batches would wait for it. The last token of a sequence is never computed, so it needs no slot.
        """
        if not self._open:
            return 0
        oldest = self._open[0]
        return oldest.size * -(-max(oldest.longest_asked - 1, 0) // block_size)

"""CUDA graphs of steps, each captured ahead or when needed: steps of decodes whole, others up to the hidden states.

Promises: a bucket's first step is computed eagerly and is the warm-up of its capture; what cannot be captured is
computed eagerly, logged once. Must not know: sampling.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.execution.gpu.device import Device, Graph
from quire_engine.execution.gpu.tables import ADAPTED, DRAWS, LIMITS_K, LIMITS_P

_log = logging.getLogger(__name__)

_SIZES = (1, 2, 4, *range(8, 129, 8), *range(160, 257, 32), *range(320, 513, 64))
_SHORTEST = 256  # tokens of context: one part of a decode's keys
# Rows of steps with prompts. With more the device computes longer than the host launches, and a graph gains nothing.
_MIXED_SIZES = (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_SEQUENCES = (2, 8, 32, 128, 512)  # of such steps: those that are added have no rows
MOST_MIXED_ROWS = _MIXED_SIZES[-1]
MOST_GRAPHS = 128
_MOST_MIXED = 64  # of them
_MOST_AHEAD = 96  # captured ahead: the others are left for steps that were not foreseen
_FIRST_CONTEXTS = 2  # that are captured ahead before any step was that long
_LIKELY = (0, DRAWS)  # choices that are captured ahead before any request asked for them
GRAPH_BYTES = 2 << 20  # of one beside the memory that all share: its nodes and their arguments


class Bucket(NamedTuple):
    """The sizes that a graph of decodes is captured for."""

    num_rows: int
    context: int  # tokens at most: it decides how many parts a decode's keys are computed in
    flags: int  # of the choice of tokens and of adapters: they decide what is launched


class MixedBucket(NamedTuple):
    """The sizes that a graph of a step with prompts is captured for; it may hold decodes too."""

    num_rows: int  # more than sequences
    num_sequences: int  # at least 2, so that both kinds of attention are launched
    context: int  # tokens at most
    adapted: bool = False  # rows may have adapters


class _Captured(NamedTuple):
    graph: Graph
    result: Tensor  # borrowed: the largest thing in a graph, which all of them have at one place


class StepGraphs:
    """Owns the graphs of one runner."""

    def __init__(
        self, device: Device, *, max_rows: int, max_context: int, mixed_rows: int = 0, adapted: bool = False
    ) -> None:
        """`mixed_rows`: of steps with prompts, at most `MOST_MIXED_ROWS`; 0: there are no graphs of such steps.
        `adapted`: there may be adapters.
        """
        self._device, self._adapted = device, adapted
        self._sizes = row_buckets(max_rows)
        self._contexts = context_buckets(max_context)
        self._sequences = _SEQUENCES[: bisect_left(_SEQUENCES, max_rows) + 1]
        least = min(mixed_rows, MOST_MIXED_ROWS)
        self._mixed_sizes = _MIXED_SIZES[: bisect_left(_MIXED_SIZES, least) + 1] if least else ()
        self._captured: dict[Bucket | MixedBucket, _Captured] = {}
        self._eager: set[Bucket | MixedBucket] = set()
        self._full = False

    def __len__(self) -> int:
        return len(self._captured)

    def bucket(self, num_rows: int, context: int, flags: int) -> Bucket | None:
        """The smallest that holds such a step."""
        size, length = bisect_left(self._sizes, num_rows), bisect_left(self._contexts, context)
        if size == len(self._sizes) or length == len(self._contexts):
            return None
        return Bucket(self._sizes[size], self._contexts[length], flags)

    def mixed_bucket(
        self, num_rows: int, num_sequences: int, context: int, *, adapted: bool = False
    ) -> MixedBucket | None:
        """The smallest that holds such a step."""
        count, length = bisect_left(self._sequences, num_sequences), bisect_left(self._contexts, context)
        if count == len(self._sequences) or length == len(self._contexts):
            return None
        sequences = self._sequences[count]
        size = bisect_left(self._mixed_sizes, max(num_rows, sequences + 1))
        if size == len(self._mixed_sizes):
            return None
        return MixedBucket(self._mixed_sizes[size], sequences, self._contexts[length], adapted)

    @property
    def largest_mixed(self) -> MixedBucket | None:
        """None: there are no graphs of such steps."""
        fitting = [count for count in self._sequences if self._mixed_sizes and count < self._mixed_sizes[-1]]
        return MixedBucket(self._mixed_sizes[-1], fitting[-1], self._contexts[-1], self._adapted) if fitting else None

    @property
    def largest(self) -> Bucket:
        """The bucket that takes the most memory. Captured first, its pool has room for every other graph."""
        flags = DRAWS | LIMITS_K | LIMITS_P | (ADAPTED if self._adapted else 0)
        return Bucket(self._sizes[-1], self._contexts[-1], flags)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that decodes are padded to."""
        return self._sizes

    @property
    def shortest(self) -> int:
        """Tokens of the shortest contexts that graphs are captured for."""
        return self._contexts[0]

    def missing(self) -> list[Bucket | MixedBucket]:
        """The graphs that steps will likely need, the next one first: none where no memory is left for them.

        Of short contexts before long ones, up to those that steps had; of many rows before few, as a step of many rows
        waits longest for its launches; and with the choices that requests asked for.
        """
        known = [bucket for bucket in self._captured if isinstance(bucket, Bucket)]
        longest = max((bucket.context for bucket in known if bucket != self.largest), default=0)
        flags = dict.fromkeys((*_LIKELY, *(bucket.flags for bucket in known)))
        found: list[Bucket | MixedBucket] = []
        for index, context in enumerate(self._contexts):
            if index >= _FIRST_CONTEXTS and context > longest:
                break
            found += [Bucket(size, context, each) for size in reversed(self._sizes) for each in flags]
            found += [MixedBucket(size, self._sequences[0], context) for size in reversed(self._mixed_sizes)]
        room = 0 if self._full else _MOST_AHEAD - len(self)
        missing = [bucket for bucket in found if bucket not in self._captured and bucket not in self._eager]
        return missing[: max(0, room)]

    def run(self, bucket: Bucket | MixedBucket, compute: Callable[[], Tensor]) -> Tensor:
        """Issue the bucket's step, whose input has been sent: its result, which holds until the next step.

        `compute` issues it eagerly, from the same addresses whenever the bucket is the same.
        """
        captured = self._captured.get(bucket)
        if captured is not None:
            captured.graph.replay()
            return captured.result
        result = compute()
        if bucket not in self._eager:
            self._capture(bucket, compute)
        return result

    def _capture(self, bucket: Bucket | MixedBucket, compute: Callable[[], Tensor]) -> None:
        num_mixed = sum(isinstance(other, MixedBucket) for other in self._captured)
        if len(self) >= MOST_GRAPHS or (isinstance(bucket, MixedBucket) and num_mixed >= _MOST_MIXED):
            self._stay_eager(bucket, f"there are {len(self)} already, {num_mixed} of them of steps with prompts")
            return
        kept: list[Tensor] = []
        try:
            graph = self._device.capture(lambda: kept.append(compute()))
        except torch.OutOfMemoryError:
            self._device.release()
            self._stay_eager(bucket, "the device's memory is too small for it")
            return
        except RuntimeError as error:
            # The step itself has been computed. If the device is lost, the next one finds out and ends the process.
            self._stay_eager(bucket, f"capturing it failed: {error}")
            return
        self._captured[bucket] = _Captured(graph, self._device.borrow(kept[0]))

    def leave(self, bucket: Bucket | MixedBucket) -> None:
        """The device's memory is too small for such a step beside what is there: do not capture it."""
        self._stay_eager(bucket, "the device's memory is too small for it")

    def _stay_eager(self, bucket: Bucket | MixedBucket, reason: str) -> None:
        self._eager.add(bucket)
        level = logging.DEBUG if self._full else logging.WARNING
        self._full = True
        _log.log(
            level,
            "steps of %d rows and contexts of up to %d tokens run without a graph: %s",
            bucket.num_rows,
            bucket.context,
            reason,
        )


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Sizes up to the first that holds `max_rows`; none larger than the largest there is."""
    return _SIZES[: bisect_left(_SIZES, max_rows) + 1]


def context_buckets(max_context: int) -> tuple[int, ...]:
    """256 tokens and each time four times as many; the last is `max_context`."""
    found, length = [], _SHORTEST
    while length < max_context:
        found.append(length)
        length *= 4
    return (*found, max_context)

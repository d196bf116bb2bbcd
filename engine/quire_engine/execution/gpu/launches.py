"""Launches of a step's layers, here and in all other ranks: one by one, as one graph, or as a graph of decodes.

Promises: the other ranks are told each piece of work before it is issued here. Must not know: sampling, requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from torch import Tensor

from quire_engine.execution.gpu.device import Packed
from quire_engine.execution.gpu.forward import pad_decodes, pad_mixed
from quire_engine.execution.gpu.graphs import Bucket, MixedBucket
from quire_engine.execution.gpu.rank_commands import RankCommands
from quire_engine.execution.gpu.resident import GRAPHS, Resident
from quire_engine.execution.gpu.step_arrays import StepArrays
from quire_engine.execution.gpu.tables import ADAPTED
from quire_engine.execution.model_input import lengths


class Launches:
    """Sends a step's sections and computes its layers by what is resident, with the other ranks."""

    def __init__(self, resident: Resident, others: RankCommands) -> None:
        self.chained: dict[int, bool] = {}  # by rows, whether fewer launches were measured to be faster
        self._resident, self._others = resident, others

    def is_chained(self, num_rows: int) -> bool:
        """Return whether chained kernels won at the next larger number of rows that was measured."""
        return next((self.chained[rows] for rows in sorted(self.chained) if rows >= num_rows), False)

    def layers(self, arrays: StepArrays) -> tuple[Packed, Tensor]:
        """Launch all layers one by one; return the sections sent, and the hidden states of all rows."""
        packed, step = self._send(arrays), arrays.step
        sizes = lengths(step.query_starts), step.context_lens, lengths(step.sampled_starts)
        with self._others.hidden(*sizes):
            return packed, self._resident.forward.hidden(packed, *sizes, adapted=bool(step.adapters))

    def mixed(self, arrays: StepArrays, bucket: MixedBucket) -> tuple[Packed, Tensor]:
        """Launch a padded step's graph; return the sections sent, and the hidden states of sample rows and padding."""
        resident = self._resident
        arrays.flags |= ADAPTED if bucket.adapted else 0
        sizes = bucket.num_rows, bucket.num_sequences
        pad_mixed(arrays, *sizes, resident.tables, resident.spare_slots, resident.first_word)
        packed = self._send(arrays)
        with self._others.graph(bucket):
            return packed, resident.graphs.run(bucket, lambda: resident.forward.mixed(packed, *bucket))

    def send_decodes(self, arrays: StepArrays, bucket: Bucket) -> Packed:
        """Pad a step of decodes to its bucket's size and send it."""
        resident = self._resident
        arrays.flags |= bucket.flags & ADAPTED
        pad_decodes(arrays, bucket.num_rows, resident.tables, resident.spare_slots, resident.first_word)
        return self._send(arrays)

    def decodes(self, bucket: Bucket, packed: Packed) -> Tensor:
        """Launch the graph of decodes that were sent; return their logits. The outcome is in the graphs' region."""
        forward, into = self._resident.forward, self._resident.regions[GRAPHS]
        chained = self.is_chained(bucket.num_rows)
        with self._others.graph(bucket):
            return self._resident.graphs.run(bucket, lambda: forward.decode(packed, *bucket, into, chained=chained))

    def _send(self, arrays: StepArrays) -> Packed:
        deltas, most = self._resident.tables.take_deltas(), self._resident.max_cells
        while len(deltas.get("cells", ())) > most:  # more than a step's buffer is meant to hold
            some = {name: deltas[name][:most] for name in ("cells", "cell_blocks")}
            deltas |= {name: deltas[name][most:] for name in some}
            self._put(some)
        return self._put(arrays.sections() | deltas)

    def _put(self, sections: Mapping[str, array[int]]) -> Packed:
        self._others.sent(sections)
        return self._resident.send(sections)

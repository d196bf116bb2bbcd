"""Steps in flight: where each leaves its outcome, and where the next one finds the tokens that are not known yet.

Promises: a step never writes where the one before it has left its tokens. Must not know: kernels, requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_engine.contract.batch import Batch, ScheduledSequence, StepResult
from quire_engine.contract.decodes import BatchInColumns
from quire_engine.execution.finishing import Finished
from quire_engine.execution.gpu.device import Event, HostBuffer
from quire_engine.execution.gpu.forward import Region, read_region


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place where a step leaves its outcome, and where the step before it left its tokens."""

    region: Region
    number: int  # of the region
    outcome: HostBuffer
    pending: Mapping[int, int]  # by sequence id: the word with the token that the step before samples


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedStep:
    """A step whose work has been issued."""

    finished: Finished
    outcome: HostBuffer
    max_rows: int  # of the outcome's region
    first: int  # of its rows
    columns: HostBuffer | None
    num_padding_rows: int
    done: Event

    def result(self) -> StepResult:
        """Wait for the device and read the outcome."""
        self.done.wait()
        ids, finite, possible = read_region(self.outcome, self.max_rows, self.first, len(self.finished.step.choices))
        columns = None if self.columns is None else self.columns.bytes
        return self.finished.read(ids, finite, possible, columns, num_padding_rows=self.num_padding_rows)


class Pipeline:
    """Regions of two steps that take turns, and as many buffers on the host as steps are in flight."""

    def __init__(self, regions: Sequence[Region], outcomes: Sequence[HostBuffer]) -> None:
        """`regions`: two, of the device; `outcomes`: their copies on the host, one a step in flight."""
        self._regions, self._outcomes = regions, outcomes
        self._num_begun = 0
        self._pending: dict[int, int] = {}

    def next_place(self) -> Place:
        """Return the next step's place, in another region than the last step's, which may have to be computed again."""
        number = self._num_begun % 2
        outcome = self._outcomes[self._num_begun % len(self._outcomes)]
        return Place(region=self._regions[number], number=number, outcome=outcome, pending=self._pending)

    def advance(self, batch: Batch) -> None:
        """Note that the step of the next place is begun: the one after it finds its tokens there."""
        first = self._regions[self._num_begun % 2].first_word
        self._num_begun += 1
        # The step after one with drafts is planned when these are judged, and has no token to look for.
        items = () if batch.num_drafts else batch.others
        sampling = [sequence_id for item in items for sequence_id in sampling_of(item)]
        if isinstance(batch, BatchInColumns):  # whose rows come first
            sampling = batch.decodes.sequence_ids.tolist() + sampling
        self._pending = {sequence_id: first + row for row, sequence_id in enumerate(sampling)}


def sampling_of(item: ScheduledSequence) -> list[int]:
    """The sequences that an item samples a token for."""
    return [item.sequence_id, *(fork.sequence_id for fork in item.forks)] if item.wants_sample else []

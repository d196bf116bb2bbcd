"""Issues steps to a GPU and leaves them there: the host waits when it asks for a result.

Promises: a step is one copy to the device, its work and one copy back, and the host waits for none of it until
`result`; except where a request has rules of its own, a graph is captured or something fails. Must not know: queues,
the allocator.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quire_engine.contract.batch import Batch, ScheduledSequence, StepResult
from quire_engine.contract.decodes import BatchInColumns
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.finishing import Finished, Finisher, Span, spans
from quire_engine.execution.gpu.adapters import PlacedAdapters
from quire_engine.execution.gpu.device import Device, Event, HostBuffer, Packed
from quire_engine.execution.gpu.forward import (
    Model,
    Region,
    pad_decodes,
    pad_mixed,
    read_region,
    region_bytes,
)
from quire_engine.execution.gpu.graphs import Bucket, MixedBucket
from quire_engine.execution.gpu.resident import GRAPHS, Resident, RunnerLimits
from quire_engine.execution.gpu.step_arrays import StepArrays, build_step_arrays
from quire_engine.execution.gpu.tables import ADAPTED
from quire_engine.execution.gpu.told import Nobody, Told
from quire_engine.execution.model_input import lengths
from quire_engine.execution.runner import LOGITS_BYTES
from quire_engine.execution.sampler import Chosen, Sampler
from quire_engine.execution.step_tensors import StepTensors, step_tensors
from quire_kernels.kernel_set import ChoiceRows

_log = logging.getLogger(__name__)
_MEASURED_ROWS, _MEASURED_REPLAYS = (1, 8, 16, 32, 64), 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The place where a step leaves its outcome, and where the step before it left its tokens."""

    region: Region
    number: int  # of the region
    outcome: HostBuffer
    sampled: Mapping[int, int]  # by sequence id: the word with the token that the step before samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """A step whose work has been issued."""

    finished: Finished
    outcome: HostBuffer
    max_rows: int  # of the outcome's region
    first: int  # of its rows
    columns: HostBuffer | None
    num_padding_rows: int
    done: Event

    def result(self) -> StepResult:
        self.done.wait()
        ids, finite, possible = read_region(self.outcome, self.max_rows, self.first, len(self.finished.step.choices))
        columns = None if self.columns is None else self.columns.bytes
        return self.finished.read(ids, finite, possible, columns, num_padding_rows=self.num_padding_rows)


class GpuRunner:
    """Owns what stays on the device between steps beside weights and pool: tables, input, outcomes, graphs."""

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        device: Device,
        limits: RunnerLimits,
        *,
        grammars: Grammars | None = None,
        adapters: PlacedAdapters | None = None,
        logits_bytes: int = LOGITS_BYTES,
        num_buffers: int = 2,
        max_in_flight: int = 2,
        others: Told | None = None,
    ) -> None:
        """`kv`: the pool, as the kernels lay it out. Without `grammars` or `adapters` requests for them fail. `others`:
        ranks that compute the model together with this one."""
        self.max_in_flight = max_in_flight
        self._adapters = adapters
        self._model, self._device, self._limits = model, device, limits
        self._others = others or Nobody()
        self._constraints, self._sampler = Constraints(grammars), Sampler()
        self._vocab_size = vocab_size = model.config.vocab_size
        self._logits_rows = max(1, logits_bytes // (4 * vocab_size))
        places = None if adapters is None else adapters.places
        self._resident = resident = Resident(model, kv, device, limits, num_buffers=num_buffers, places=places)
        self._graphs, self._tables, self._forward = resident.graphs, resident.tables, resident.forward
        self._regions, self._first_word = resident.regions, resident.first_word
        self._max_rows, self._max_cells = resident.max_rows, resident.max_cells
        self._outcomes = [device.host_buffer(region_bytes(self._max_rows)) for _ in range(self.max_in_flight)]
        self._num_begun = 0
        self._chained: dict[int, bool] = {}  # by rows, whether fewer launches were measured to be faster
        self._region = 0  # of the last step
        self._sampled: dict[int, int] = {}  # by sequence id: the word with the token that the last step samples

    @contextmanager
    def work(self) -> Iterator[None]:
        with self._device.work(), torch.inference_mode():
            yield

    def begin(self, batch: Batch, *, graphs: bool = True) -> _Issued:
        """Issue a step. Without `graphs` launch by launch, as one that no graph serves."""
        place = self._place()
        issued = self._issue(batch, place, graphs=graphs and self._limits.graphs)
        self._advance(batch)
        return issued

    def in_parts(self, batch: Batch) -> Callable[[Batch, int], StepResult]:
        """Part by part and waited for. An item that fails leaves token 0 for the step after."""
        batch, place = batch.whole(), self._place()
        self._advance(batch)
        place.region.ids.zero_()
        starts = list(accumulate((len(_sampling_of(item)) + item.num_drafts for item in batch.items), initial=0))
        return lambda part, index: self._issue(part, place, starts[index], graphs=False).result()

    def release(self) -> None:
        self._device.release()

    def capture_largest(self) -> None:
        """Capture the graphs that take the most memory: in what they allocate all others find room."""
        if not self._limits.graphs:
            return
        bucket, mixed = self._graphs.largest, self._graphs.largest_mixed
        with self.work():
            self._run_empty(bucket)
            if mixed is not None:
                self._run_empty(mixed)

    def choose_launches(self) -> None:
        """Find out where layers of decodes in fewer launches are faster than single ops, while no step is in flight.

        Both are measured, as graphs of padding. Where that fails, single ops are used.
        """
        if not self._model.chains_decodes or not self._limits.graphs:
            return
        for num_rows in [size for size in self._graphs.sizes if size in _MEASURED_ROWS]:
            bucket = Bucket(num_rows, self._graphs.shortest, 0)
            try:
                with self.work():
                    packed = self._send_decodes(StepArrays(), bucket)
                    single, chained = (self._seconds(bucket, packed, chained=way) for way in (False, True))
            except Exception as error:  # of the device's memory, of a capture, of a kernel's compiler
                self._device.release()
                _log.warning("steps of %d decodes are computed by single ops: %s", num_rows, error)
                return
            self._chained[num_rows] = chained < single
            _log.info(
                "%d decodes: %.3f ms in fewer launches, %.3f ms by single ops", num_rows, chained * 1e3, single * 1e3
            )

    def _seconds(self, bucket: Bucket, packed: Packed, *, chained: bool) -> float:
        """The shortest of a few replays of a bucket's step."""
        into = self._regions[GRAPHS]

        def compute() -> None:
            self._forward.decode(packed, *bucket, into, chained=chained)

        compute()  # kernels are compiled
        graph, found = self._device.capture(compute), list[float]()
        for _ in range(_MEASURED_REPLAYS):
            self._device.record().wait()
            started = time.perf_counter()
            graph.replay()
            self._device.record().wait()
            found.append(time.perf_counter() - started)
        return min(found)

    def _is_chained(self, num_rows: int) -> bool:
        """Return whether chained kernels won at the next larger number of rows that was measured."""
        return next((self._chained[rows] for rows in sorted(self._chained) if rows >= num_rows), False)

    def capture_next(self) -> int:
        """Capture one graph that steps will likely need, while no step is in flight; how many are left."""
        if not self._limits.graphs:
            return 0
        missing = self._graphs.missing()
        if not missing:
            return 0
        with self.work():
            try:
                self._run_empty(missing[0])
            except torch.OutOfMemoryError:  # of its eager step, before the capture
                self._graphs.leave(missing[0])
                self._device.release()
        return len(self._graphs.missing())

    def _run_empty(self, bucket: Bucket | MixedBucket) -> None:
        """A step of padding alone."""
        if isinstance(bucket, MixedBucket):
            self._run_mixed(StepArrays(), bucket)
        else:
            self._run(bucket, self._send_decodes(StepArrays(), bucket))

    def _place(self) -> _Place:
        """Return the next step's place, in another region than the last step's, which may have to be computed again."""
        outcome = self._outcomes[self._num_begun % len(self._outcomes)]
        number = 1 - self._region
        return _Place(region=self._regions[number], number=number, outcome=outcome, sampled=self._sampled)

    def _advance(self, batch: Batch) -> None:
        """The step to come is begun: the next one's tokens lie in its region."""
        self._num_begun += 1
        self._region = 1 - self._region
        first = self._regions[self._region].first_word
        # The step after one with drafts is planned when these are judged, and has no token to look for.
        items = () if batch.num_drafts else batch.others
        sampling = [sequence_id for item in items for sequence_id in _sampling_of(item)]
        if isinstance(batch, BatchInColumns):  # whose rows come first
            sampling = batch.decodes.sequence_ids.tolist() + sampling
        self._sampled = {sequence_id: first + row for row, sequence_id in enumerate(sampling)}

    def _issue(self, batch: Batch, place: _Place, first: int = 0, *, graphs: bool = True) -> _Issued:
        """Build, send, compute; the outcome of the choices goes to the region's rows from `first` on."""
        # As decodes of their own, rows with drafts are served by the same graphs and kernels as without.
        possible = self._constraints.possible
        step = step_tensors(batch, self._limits.block_size, self._vocab_size, possible, rows_apart=True)
        try:
            arrays = build_step_arrays(step, self._tables, self._limits.max_model_len, place.sampled, self._first_word)
            if step.adapters:
                arrays.row_places, arrays.flags = self._place_rows(step), arrays.flags | ADAPTED
            bucket = mixed = None
            if graphs and arrays.only_decodes:
                bucket = self._graphs.bucket(step.num_rows, max(step.context_lens), arrays.flags)
            elif graphs and step.samples_at_most_once:
                sizes = step.num_rows, len(arrays.table_slots), max(step.context_lens)
                mixed = self._graphs.mixed_bucket(*sizes, adapted=bool(step.adapters))
            if bucket is None:
                finisher = self._compute(arrays, place.region, first, mixed)
            else:
                finisher = self._replay(arrays, bucket, place.region)
        except Exception:
            self._tables.forget()
            raise
        self._others.tokens(place.number, place.region.ids)
        columns, fetched = finisher.columns(), None
        if columns is not None:
            fetched = self._device.host_buffer(columns.nbytes)
            self._device.fetch(columns.view(torch.uint8), fetched.tensor)
        self._device.fetch(place.region.bytes, place.outcome.tensor)
        return _Issued(
            finished=finisher.finished(),
            outcome=place.outcome,
            max_rows=self._max_rows,
            first=first,
            columns=fetched,
            num_padding_rows=arrays.num_padding_rows,
            done=self._device.record(),
        )

    def _place_rows(self, step: StepTensors) -> array[int]:
        if self._adapters is None:
            raise ValueError("a request has an adapter, and there are none")
        return self._adapters.place_rows(step, self._device)

    def _compute(self, arrays: StepArrays, region: Region, first: int, bucket: MixedBucket | None) -> Finisher:
        """Any step: launch by launch, but for the layers of one that has a bucket."""
        step = arrays.step
        wanted = list(spans(step, self._logits_rows))
        if bucket is None:
            packed = self._send(arrays)
            sizes = lengths(step.query_starts), step.context_lens, lengths(step.sampled_starts)
            with self._others.hidden(*sizes):
                hidden = self._forward.hidden(packed, *sizes, adapted=bool(step.adapters))
        else:
            packed, hidden = self._run_mixed(arrays, bucket)
        finisher = Finisher(self._model, step, packed, self._constraints)
        hidden = finisher.pool(hidden)
        if step.pooled:
            self._others.kept()
        for span in wanted:
            with self._others.logits(span.rows):
                logits = self._forward.logits(hidden[span.rows])
            rows, chosen = self._choices(arrays, packed, span, region, first)
            self._forward.choose(logits, rows, chosen)
            self._finish(finisher, span, logits, rows, chosen)
        return finisher

    def _replay(self, arrays: StepArrays, bucket: Bucket, region: Region) -> Finisher:
        """A step of decodes in one launch, where its graph is there, and a copy of its outcome."""
        span = Span.whole(arrays.step)
        packed = self._send_decodes(arrays, bucket)
        logits = self._run(bucket, packed)
        region.bytes.copy_(self._regions[GRAPHS].bytes)
        finisher = Finisher(self._model, arrays.step, packed, self._constraints)
        if arrays.step.rules or arrays.step.told:
            self._finish(finisher, span, logits, *self._choices(arrays, packed, span, region, 0))
        return finisher

    def _finish(self, finisher: Finisher, span: Span, logits: Tensor, rows: ChoiceRows, chosen: Chosen) -> None:
        ruled = finisher.ruled(span)  # the device is at work on the logits meanwhile
        if ruled is not None:
            self._forward.choose_ruled(ruled, self._sampler, logits, rows, chosen)
        finisher.finish(span, logits, rows.logits_rows, chosen.ids)

    def _run(self, bucket: Bucket, packed: Packed) -> Tensor:
        into = self._regions[GRAPHS]
        chained = self._is_chained(bucket.num_rows)
        with self._others.graph(bucket):
            return self._graphs.run(bucket, lambda: self._forward.decode(packed, *bucket, into, chained=chained))

    def _run_mixed(self, arrays: StepArrays, bucket: MixedBucket) -> tuple[Packed, Tensor]:
        """The sections sent, and the hidden states of the sample rows and of padding."""
        tables, first_word = self._tables, self._first_word
        spare_slots = self._resident.spare_slots
        arrays.flags |= ADAPTED if bucket.adapted else 0
        pad_mixed(arrays, bucket.num_rows, bucket.num_sequences, tables, spare_slots, first_word)
        packed = self._send(arrays)
        with self._others.graph(bucket):
            return packed, self._graphs.run(bucket, lambda: self._forward.mixed(packed, *bucket))

    def _choices(
        self, arrays: StepArrays, packed: Packed, span: Span, region: Region, first: int
    ) -> tuple[ChoiceRows, Chosen]:
        """The parameters of a span's choices, counted from the span's first row of logits, and where they go."""
        rows, positions = packed["choice_rows"][span.choices], packed["choice_positions"][span.choices]
        if span.rows.start:  # sums are of memory of their own, and aligned again
            rows, positions = rows - span.rows.start, positions + 0
        slots = packed["choice_slots"][span.choices.start :]
        found = self._tables.choice_rows(slots, rows, positions, arrays.flags)
        return found, region.chosen(first + span.choices.start, len(rows))

    def _send_decodes(self, arrays: StepArrays, bucket: Bucket) -> Packed:
        arrays.flags |= bucket.flags & ADAPTED
        pad_decodes(arrays, bucket.num_rows, self._tables, self._resident.spare_slots, self._first_word)
        return self._send(arrays)

    def _send(self, arrays: StepArrays) -> Packed:
        deltas = self._tables.take_deltas()
        while len(deltas.get("cells", ())) > self._max_cells:  # more than a step's buffer is meant to hold
            some = {name: deltas[name][: self._max_cells] for name in ("cells", "cell_blocks")}
            deltas |= {name: deltas[name][self._max_cells :] for name in some}
            self._put(some)
        return self._put(arrays.sections() | deltas)

    def _put(self, sections: Mapping[str, array[int]]) -> Packed:
        self._others.sent(sections)
        return self._resident.send(sections)


def _sampling_of(item: ScheduledSequence) -> list[int]:
    """The sequences that an item samples a token for."""
    return [item.sequence_id, *(fork.sequence_id for fork in item.forks)] if item.wants_sample else []

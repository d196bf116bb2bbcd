"""Issues steps to a GPU and leaves them there: the host waits when it asks for a result.

Promises: a step is one copy to the device, its work and one copy back, and the host waits for none of it until
`result`; except where a request has rules of its own, a graph is captured or something fails. Must not know: queues,
the allocator.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from quire_engine.contract.batch import Batch, StepResult
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.finishing import Finisher, Span, spans
from quire_engine.execution.gpu.adapters import PlacedAdapters
from quire_engine.execution.gpu.device import Device, Packed
from quire_engine.execution.gpu.forward import Model, Region, region_bytes
from quire_engine.execution.gpu.graphs import Bucket, MixedBucket
from quire_engine.execution.gpu.launches import Launches
from quire_engine.execution.gpu.pipeline import IssuedStep, Pipeline, Place, sampling_of
from quire_engine.execution.gpu.rank_commands import NoRanks, RankCommands
from quire_engine.execution.gpu.resident import GRAPHS, Resident, RunnerLimits
from quire_engine.execution.gpu.step_arrays import StepArrays, build_step_arrays
from quire_engine.execution.gpu.tables import ADAPTED
from quire_engine.execution.gpu.warmup import WarmUp
from quire_engine.execution.runner import LOGITS_BYTES
from quire_engine.execution.sampler import Chosen, Sampler
from quire_engine.execution.step_tensors import StepTensors, step_tensors
from quire_kernels.kernel_set import ChoiceRows


class GpuRunner:
    """Issues steps, one behind the other: `begin` is the one way in, by launches or by graphs.

    Owns what stays on the device between steps beside weights and pool: tables, input, outcomes, graphs.
    """

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
        others: RankCommands | None = None,
    ) -> None:
        """`kv`: the pool, as the kernels lay it out. Without `grammars` or `adapters` requests for them fail. `others`:
        ranks that compute the model together with this one."""
        self.max_in_flight = max_in_flight
        self._adapters = adapters
        self._model, self._device, self._limits = model, device, limits
        self._others = others = others or NoRanks()
        self._constraints, self._sampler = Constraints(grammars), Sampler()
        self._vocab_size = vocab_size = model.config.vocab_size
        self._logits_rows = max(1, logits_bytes // (4 * vocab_size))
        places = None if adapters is None else adapters.places
        self._resident = resident = Resident(model, kv, device, limits, num_buffers=num_buffers, places=places)
        self._graphs, self._tables, self._forward = resident.graphs, resident.tables, resident.forward
        outcomes = [device.host_buffer(region_bytes(resident.max_rows)) for _ in range(max_in_flight)]
        self._pipeline = Pipeline(resident.regions[:GRAPHS], outcomes)
        self._launches = Launches(resident, others)
        self._warmup = WarmUp(self._launches, resident, device)

    @contextmanager
    def work(self) -> Iterator[None]:
        with self._device.work(), torch.inference_mode():
            yield

    def begin(self, batch: Batch, *, graphs: bool = True) -> IssuedStep:
        """Issue a step. Without `graphs` launch by launch, as one that no graph serves."""
        issued = self._issue(batch, self._pipeline.next_place(), graphs=graphs and self._limits.graphs)
        self._pipeline.advance(batch)
        return issued

    def in_parts(self, batch: Batch) -> Callable[[Batch, int], StepResult]:
        """Part by part and waited for. An item that fails leaves token 0 for the step after."""
        batch, place = batch.whole(), self._pipeline.next_place()
        self._pipeline.advance(batch)
        place.region.ids.zero_()
        starts = list(accumulate((len(sampling_of(item)) + item.num_drafts for item in batch.items), initial=0))
        return lambda part, index: self._issue(part, place, starts[index], graphs=False).result()

    def release(self) -> None:
        self._device.release()

    def capture_largest(self) -> None:
        """See `WarmUp`; does nothing without graphs."""
        if self._limits.graphs:
            with self.work():
                self._warmup.capture_largest()

    def choose_launches(self) -> None:
        """See `WarmUp`; does nothing without graphs, or where there are no kernels for fewer launches."""
        if self._model.chains_decodes and self._limits.graphs:
            with self.work():
                self._warmup.choose_launches()

    def capture_next(self) -> int:
        """See `WarmUp`; 0 without graphs."""
        if not self._limits.graphs:
            return 0
        with self.work():
            return self._warmup.capture_next()

    def _issue(self, batch: Batch, place: Place, first: int = 0, *, graphs: bool = True) -> IssuedStep:
        """Build, send, compute; the outcome of the choices goes to the region's rows from `first` on."""
        # As decodes of their own, rows with drafts are served by the same graphs and kernels as without.
        possible = self._constraints.possible
        step = step_tensors(batch, self._limits.block_size, self._vocab_size, possible, rows_apart=True)
        try:
            arrays = build_step_arrays(
                step, self._tables, self._limits.max_model_len, place.pending, self._resident.first_word
            )
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
        return IssuedStep(
            finished=finisher.finished(),
            outcome=place.outcome,
            max_rows=self._resident.max_rows,
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
        packed, hidden = self._launches.layers(arrays) if bucket is None else self._launches.mixed(arrays, bucket)
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
        packed = self._launches.send_decodes(arrays, bucket)
        logits = self._launches.decodes(bucket, packed)
        region.bytes.copy_(self._resident.regions[GRAPHS].bytes)
        finisher = Finisher(self._model, arrays.step, packed, self._constraints)
        if arrays.step.rules or arrays.step.told:
            self._finish(finisher, span, logits, *self._choices(arrays, packed, span, region, 0))
        return finisher

    def _finish(self, finisher: Finisher, span: Span, logits: Tensor, rows: ChoiceRows, chosen: Chosen) -> None:
        ruled = finisher.ruled(span)  # the device is at work on the logits meanwhile
        if ruled is not None:
            self._forward.choose_ruled(ruled, self._sampler, logits, rows, chosen)
        finisher.finish(span, logits, rows.logits_rows, chosen.ids)

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

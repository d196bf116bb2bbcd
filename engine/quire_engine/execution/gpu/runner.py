"""Executes batches on a GPU one step ahead: `launch` issues a step's work, `collect` waits for the oldest one's
result.

Promises: a step is one copy to the device, its work and one copy back, and the host waits for none of it until
`collect`; except where a request has rules of its own, a graph is captured or something fails. Who raises at launch
fails alone. Must not know: queues, the allocator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from pathlib import Path

import torch
from torch import Tensor

from quire_engine.batch import Batch, ScheduledSequence, StepResult
from quire_engine.config import Fault
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.fault_points import FaultPoints
from quire_engine.execution.gpu.device import ALIGNMENT, Device, Event, Packed, PackedInput, aligned
from quire_engine.execution.gpu.finishing import Finished, Finisher, Span, spans
from quire_engine.execution.gpu.forward import Forward, Model, Region, pad_decodes, pad_mixed, region_at, region_bytes
from quire_engine.execution.gpu.graphs import Bucket, MixedBucket, StepGraphs
from quire_engine.execution.gpu.step_arrays import StepArrays, StepLimits, build_step_arrays
from quire_engine.execution.gpu.swaps import StreamedKV
from quire_engine.execution.gpu.tables import SlotTables, padded_rows
from quire_engine.execution.kv_storage import HostBlocks
from quire_engine.execution.runner import LOGITS_BYTES, KVBlocks
from quire_engine.execution.sampler import Sampler
from quire_engine.execution.step_recovery import recover
from quire_kernels.kernel_set import ChoiceRows

_WORD = 8  # bytes
_GRAPHS = 2  # of the regions: where graphs leave their outcome. The others take turns: 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A step that has been issued."""

    finished: Finished
    done: Event

    def result(self) -> StepResult:
        self.done.wait()
        return self.finished.read()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """What memory on the device and on the host is taken for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    spare_block: int  # of the pool, which nobody else writes: where the rows that fill up a bucket go
    # Of steps with prompts that are graphs too, for kernels whose launches follow from bounds; 0: none is.
    mixed_rows: int = 0
    num_host_blocks: int = 0  # with some, the pool's blocks behind the spare one are staging blocks


class GpuRunner:
    """Owns what stays on the device between steps beside weights and pool: tables, input, outcomes, graphs."""

    def __init__(
        self,
        model: Model,
        kv: KVBlocks,
        device: Device,
        limits: RunnerLimits,
        *,
        grammars: Grammars | None = None,
        logits_bytes: int = LOGITS_BYTES,
        num_buffers: int = 2,
        max_in_flight: int = 2,
    ) -> None:
        """Without `grammars` requests for them fail."""
        self.max_in_flight = max_in_flight
        self._model, self._kv, self._device, self._limits = model, kv, device, limits
        self._sampler = Sampler(constraints=Constraints(grammars))
        vocab_size, block_size = model.config.vocab_size, limits.block_size
        self._logits_rows = max(1, logits_bytes // (4 * vocab_size))
        self._graphs = StepGraphs(
            device,
            max_rows=limits.max_num_seqs,
            max_context=limits.max_model_len,
            mixed_rows=min(limits.mixed_rows, limits.max_num_batched_tokens),
        )
        self._max_rows = max(limits.max_num_seqs, self._graphs.largest.num_rows)
        self._max_cells = max(4096, 2 * -(-limits.max_model_len // block_size))
        self._step_limits = StepLimits(block_size=block_size, vocab_size=vocab_size, max_model_len=limits.max_model_len)
        self._spare_slots = range(limits.spare_block * block_size, (limits.spare_block + 1) * block_size)
        each = region_bytes(self._max_rows)
        with device.work(), torch.inference_mode():
            self._tables = SlotTables(
                num_slots=limits.max_num_seqs,
                max_blocks=-(-limits.max_model_len // block_size),
                vocab_size=vocab_size,
                spare_block=limits.spare_block,
                device=device.torch_device,
            )
            buffer = torch.zeros(3 * each + self._input_bytes(), dtype=torch.uint8, device=device.torch_device)
        self._regions = [region_at(buffer, i * each, self._max_rows) for i in range(3)]
        self._first_word = 3 * each // _WORD
        self._input = PackedInput(device, buffer[3 * each :], num_buffers=num_buffers)
        self._forward = Forward(model, kv.tensor, self._tables, buffer.view(torch.int64), block_size)
        self._host: HostBlocks | None = None
        if limits.num_host_blocks:
            with device.work(), torch.inference_mode():
                self._host = StreamedKV(
                    kv, device, first_staging=limits.spare_block + 1, num_blocks=limits.num_host_blocks
                )
        self._outcomes = [device.host_buffer(each) for _ in range(self.max_in_flight)]
        self._num_launched = 0
        self._in_flight: deque[_Launched | StepResult] = deque()
        self._region = 0  # of the last step
        self._sampled: dict[int, int] = {}  # by sequence id: the word with the token that the last step samples

    def execute(self, batch: Batch, *, graphs: bool = True) -> StepResult:
        """One step, waited for; without `graphs` launch by launch, as one that no graph serves."""
        self.launch(batch, graphs=graphs)
        return self.collect()

    def launch(self, batch: Batch, *, graphs: bool = True) -> None:
        """Issue a step. An item that raises gets `errors[sequence_id]`.

        Raises only what no single item can be blamed for: a failing block copy, a lost device, exhausted host
        memory. The process is then in an unknown state and its owner should end it.
        """
        if len(self._in_flight) == self.max_in_flight:
            raise RuntimeError(f"{self.max_in_flight} steps are in flight, none more can be launched")
        # The other region than the last step's: should this step have to be computed again, what it reads is there.
        region = 1 - self._region
        failure: Exception | None = None
        with self._device.work(), torch.inference_mode():
            if batch.swap_out or batch.swap_in:
                self._host_blocks().swap(batch.swap_out, batch.swap_in, batch.swap_keys)
            if batch.copies:
                self._kv.copy_blocks(batch.copies)
            try:
                launched: _Launched | StepResult = self._issue(batch, region, graphs=graphs)
            except Exception as error:
                failure = error
            if failure is not None:  # outside of the handler, which would keep the failed step's tensors alive
                launched = self._issue_in_parts(batch, failure, region)
        self._in_flight.append(launched)
        self._num_launched += 1
        self._region = region
        first = self._regions[region].first_word
        self._sampled = {sequence_id: first + row for row, sequence_id in enumerate(_sampling(batch))}

    def collect(self) -> StepResult:
        """The result of the oldest launched step, when it is there."""
        if not self._in_flight:
            raise RuntimeError("no step is launched")
        launched = self._in_flight.popleft()
        return launched if isinstance(launched, StepResult) else launched.result()

    def plant(self, faults: Iterable[Fault]) -> None:
        """Let faults happen before whatever is issued from now on."""
        points = FaultPoints(faults, self._kv.tensor, self._limits.block_size)
        self._issue = points.around(self._issue)  # type: ignore[assignment,method-assign]

    def swap_seconds(self) -> float:
        """What the copy of a block to the host or from it takes, measured; before the first step."""
        with self._device.work(), torch.inference_mode():
            return self._host_blocks().seconds_per_block()

    def capture_largest(self) -> None:
        """Capture the graphs that take the most memory: in what they allocate all others find room."""
        bucket, mixed = self._graphs.largest, self._graphs.largest_mixed
        with self._device.work(), torch.inference_mode():
            self._run(bucket, self._send_decodes(StepArrays(), bucket))
            if mixed is not None:
                self._run_mixed(StepArrays(), mixed)

    def keep_host_blocks(self, directory: Path, layout: bytes) -> tuple[bytes, ...]:
        """Keep what is swapped out in files; the keys of what the first host blocks have from them."""
        return self._host_blocks().keep_in(directory, layout)

    def forget_host_blocks(self, blocks: Sequence[int]) -> None:
        """What these host blocks hold is not wanted any more, in files either."""
        self._host_blocks().forget(blocks)

    def _host_blocks(self) -> HostBlocks:
        if self._host is None:
            raise RuntimeError("a block is to be swapped where there are no host blocks")
        return self._host

    def _issue(self, batch: Batch, region: int, first: int = 0, *, graphs: bool = True) -> _Launched:
        """Build, send, compute; the outcome of the choices goes to the region's rows from `first` on."""
        into = self._regions[region]
        try:
            step = build_step_arrays(batch, self._tables, self._step_limits, self._sampled, self._first_word)
            bucket = mixed = None
            if graphs and step.only_decodes:
                bucket = self._graphs.bucket(step.num_rows, max(step.context_lens), step.flags)
            elif graphs and step.samples_at_most_once:
                mixed = self._graphs.mixed_bucket(step.num_rows, len(step.table_slots), max(step.context_lens))
            finisher = self._compute(step, into, first, mixed) if bucket is None else self._replay(step, bucket, into)
        except Exception:
            self._tables.forget()
            raise
        columns, fetched = finisher.columns(), None
        if columns is not None:
            fetched = self._device.host_buffer(columns.nbytes)
            self._device.fetch(columns.view(torch.uint8), fetched.tensor)
        outcome = self._outcomes[self._num_launched % len(self._outcomes)]
        self._device.fetch(into.bytes, outcome.tensor)
        finished = finisher.finished(outcome, self._max_rows, first, fetched)
        return _Launched(finished=finished, done=self._device.record())

    def _issue_in_parts(self, batch: Batch, failure: Exception, region: int) -> StepResult:
        """Part by part and waited for. Who fails leaves token 0 for the step after."""
        self._regions[region].ids.zero_()
        starts = list(accumulate((len(_sampling_of(item)) for item in batch.items), initial=0))

        def compute(part: Batch, index: int) -> StepResult:
            return self._issue(part, region, starts[index], graphs=False).result()

        return recover(batch, failure, compute, self._device.release)

    def _compute(self, step: StepArrays, region: Region, first: int, bucket: MixedBucket | None) -> Finisher:
        """Any step: launch by launch, but for the layers of one that has a bucket."""
        wanted = list(spans(step, self._logits_rows))
        if bucket is None:
            packed = self._send(step)
            hidden = self._forward.hidden(
                packed, _differences(step.query_starts), step.context_lens, _differences(step.sampled_starts)
            )
        else:
            packed, hidden = self._run_mixed(step, bucket)
        finisher = Finisher(self._model, step, packed, self._sampler)
        hidden = finisher.pool(hidden)
        for span in wanted:
            logits = self._forward.logits(hidden[span.rows])
            rows = self._choice_rows(step, packed, span)
            self._forward.choose(logits, rows, region, first + span.choices.start)
            finisher.finish(span, logits, rows, region, first)
        return finisher

    def _replay(self, step: StepArrays, bucket: Bucket, region: Region) -> Finisher:
        """A step of decodes in one launch, where its graph is there, and a copy of its outcome."""
        span = Span.whole(step)
        packed = self._send_decodes(step, bucket)
        logits = self._run(bucket, packed)
        region.bytes.copy_(self._regions[_GRAPHS].bytes)
        finisher = Finisher(self._model, step, packed, self._sampler)
        if step.rules or step.told:
            finisher.finish(span, logits, self._choice_rows(step, packed, span), region, 0)
        return finisher

    def _run(self, bucket: Bucket, packed: Packed) -> Tensor:
        into = self._regions[_GRAPHS]
        return self._graphs.run(bucket, lambda: self._forward.decode(packed, *bucket, into))

    def _run_mixed(self, step: StepArrays, bucket: MixedBucket) -> tuple[Packed, Tensor]:
        """What was sent, and the hidden states of the rows that are asked for and some more."""
        tables, first_word = self._tables, self._first_word
        pad_mixed(step, bucket.num_rows, bucket.num_sequences, tables, self._spare_slots, first_word)
        packed = self._send(step)
        return packed, self._graphs.run(bucket, lambda: self._forward.mixed(packed, *bucket))

    def _choice_rows(self, step: StepArrays, packed: Packed, span: Span) -> ChoiceRows:
        """The parameters of a span's choices, counted from the span's first row of logits."""
        rows, positions = packed["choice_rows"][span.choices], packed["choice_positions"][span.choices]
        if span.rows.start:  # sums are of memory of their own, and aligned again
            rows, positions = rows - span.rows.start, positions + 0
        slots = packed["choice_slots"][span.choices.start :]
        return self._tables.choice_rows(slots, rows, positions, step.flags)

    def _send_decodes(self, step: StepArrays, bucket: Bucket) -> Packed:
        pad_decodes(step, bucket.num_rows, self._tables, self._spare_slots, self._first_word)
        return self._send(step)

    def _send(self, step: StepArrays) -> Packed:
        deltas = self._tables.take_deltas()
        while len(deltas.get("cells", ())) > self._max_cells:  # more than a step's buffer is meant to hold
            some = {name: deltas[name][: self._max_cells] for name in ("cells", "cell_blocks")}
            deltas |= {name: deltas[name][self._max_cells :] for name in some}
            self._tables.apply(self._input.send(some))
        packed = self._input.send(step.fixed() | step.variable() | deltas)
        self._tables.apply(packed)
        return packed

    def _input_bytes(self) -> int:
        """What the largest step sends, and at most `_max_cells` changes of block tables."""
        limits, mixed = self._limits, self._graphs.largest_mixed
        rows = padded_rows(max(self._max_rows, mixed.num_sequences if mixed else 0))
        tokens = max(limits.max_num_batched_tokens, rows, mixed.num_rows if mixed else 0)
        of_tokens = 8 * _WORD * tokens  # ids, sources, positions, slots, sample and logit rows, scored rows and ids
        of_sequences = 6 * _WORD * rows
        of_choices = 10 * _WORD * rows  # with a slot's parameters
        return aligned(of_tokens + of_sequences + of_choices + 12 * self._max_cells + 24 * ALIGNMENT)


def _differences(starts: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sub, starts[1:], starts))


def _sampling_of(item: ScheduledSequence) -> list[int]:
    """The sequences that an item samples a token for."""
    return [item.sequence_id, *(fork.sequence_id for fork in item.forks)] if item.wants_sample else []


def _sampling(batch: Batch) -> list[int]:
    """The sequences that a batch samples a token for, in the order of its choices."""
    return [sequence_id for item in batch.items for sequence_id in _sampling_of(item)]

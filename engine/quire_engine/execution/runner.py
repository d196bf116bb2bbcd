"""Executes a batch where the host waits for it: swaps, block copies, the model, the sampler.

Promises: a sequence whose data make the model or the sampler fail fails alone, its batch-mates get the tokens they
would have got anyway; logits take a bounded amount of memory. Must not know: queues, the allocator, requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire_engine.batch import Batch, SampledToken, ScheduledSequence, StepResult
from quire_engine.config import Fault
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.fault_points import FaultPoints
from quire_engine.execution.kv_storage import HostBlocks
from quire_engine.execution.logit_rules import asks_for_argmax, asks_for_masked_argmax
from quire_engine.execution.model_input import LogitRows, ModelInput, build_model_input
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.pooling import take_pooled
from quire_engine.execution.sampler import NO_CANDIDATE, NON_FINITE, Sampler, SampleRow
from quire_engine.execution.step_recovery import recover
from quire_engine.types import TokenLogprobs

LOGITS_BYTES = 64 << 20  # most float32 logits materialised at once


class Model(Protocol):
    """The part of `models.decoder.Decoder` that a step uses."""

    @property
    def config(self) -> ModelConfig: ...
    def forward(self, step: ModelInput, kv: Tensor) -> Tensor: ...
    def normed(self, hidden: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def greedy(self, hidden: Tensor, allowed: Tensor | None) -> tuple[list[int], list[bool]] | None: ...


class KVBlocks(Protocol):
    """The part of `kv_storage.KVStorage` that a step uses."""

    @property
    def tensor(self) -> Tensor: ...
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...


@dataclass(slots=True)
class _Pending:
    """What one slice of logits rows is needed for."""

    rows: list[SampleRow] = field(default_factory=list)
    sequence_ids: list[int] = field(default_factory=list)  # of `rows`
    score_rows: list[int] = field(default_factory=list)
    score_ids: list[int] = field(default_factory=list)  # the prompt's next tokens
    score_items: list[ScheduledSequence] = field(default_factory=list)  # of `score_rows`


class Runner:
    """Owns references to the weights and the KV pool, and a step's result until it is asked for; nothing else."""

    max_in_flight = 1

    def __init__(
        self,
        decoder: Model,
        kv: KVBlocks,
        block_size: int,
        device: torch.device,
        *,
        grammars: Grammars | None = None,
        logits_bytes: int = LOGITS_BYTES,
        host: HostBlocks | None = None,
    ) -> None:
        """Without `grammars` requests for them fail, without `host` batches that swap."""
        self._host = host
        self._decoder = decoder
        self._kv = kv
        self._block_size = block_size
        self._device = device
        self._sampler = Sampler(constraints=Constraints(grammars))
        self._vocab_size = decoder.config.vocab_size
        self._logits_rows = max(1, logits_bytes // (4 * self._vocab_size))
        self._launched: StepResult | None = None

    def launch(self, batch: Batch) -> None:
        """Compute the batch; `collect` has the result. Raises as `execute` does."""
        if self._launched is not None:
            raise RuntimeError("a step was launched before the one before it was collected")
        self._launched = self.execute(batch)

    def collect(self) -> StepResult:
        """The result of the launched step."""
        if self._launched is None:
            raise RuntimeError("no step is launched")
        result, self._launched = self._launched, None
        return result

    def execute(self, batch: Batch) -> StepResult:
        """Compute the batch. An item that raises gets `errors[sequence_id]`.

        Raises only what no single item can be blamed for: a failing block copy, a lost device, exhausted host
        memory. The process is then in an unknown state and its owner should end it.
        """
        with torch.inference_mode():
            if batch.swap_out or batch.swap_in:
                self._host_blocks().swap(batch.swap_out, batch.swap_in, batch.swap_keys)
            if batch.copies:
                self._kv.copy_blocks(batch.copies)
            if not batch.items:  # none of them turned out to have a token to compute; others' blocks were swapped
                return StepResult()
            try:
                return self._compute(batch)
            except Exception as error:
                failure = error
            return recover(batch, failure, lambda part, _: self._compute(part), self._release)

    def plant(self, faults: Iterable[Fault]) -> None:
        """Let faults happen before whatever is computed from now on."""
        points = FaultPoints(faults, self._kv.tensor, self._block_size)
        self._compute = points.around(self._compute)  # type: ignore[assignment,method-assign]

    def swap_seconds(self) -> float:
        """What the copy of a block to the host or from it takes, measured; before the first step."""
        return self._host_blocks().seconds_per_block()

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

    def _release(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _compute(self, batch: Batch) -> StepResult:
        for item in batch.items:
            self._check_ids(item)
        step, logit_rows = build_model_input(batch, self._block_size, self._device)
        hidden = self._decoder.forward(step, self._kv.tensor)  # [S, H]
        result = StepResult()
        if any(item.pooling for item in batch.items):
            batch, logit_rows, hidden = take_pooled(self._decoder, batch, logit_rows, hidden, result)
        if self._greedy(batch, hidden, logit_rows, result):
            return result
        scores: dict[int, list[TokenLogprobs]] = {
            item.sequence_id: [] for item in batch.items if item.wants_prompt_logprobs
        }
        slices = self._plan_slices(batch, logit_rows, hidden.shape[0])
        for i, pending in enumerate(slices):
            start = i * self._logits_rows
            logits = self._decoder.logits(hidden[start : start + self._logits_rows])  # [s, V] float32
            sampled = self._sampler.sample(logits, pending.rows)
            for sequence_id, row, token in zip(pending.sequence_ids, pending.rows, sampled, strict=True):
                result.samples[sequence_id] = self._sampler.with_forced(row, token)
                if token.error == NON_FINITE:
                    result.non_finite.add(sequence_id)
            self._score(logits, pending, scores, result)
        for sequence_id, entries in scores.items():
            if sequence_id not in result.errors:
                result.prompt_logprobs[sequence_id] = tuple(entries)
        return result

    def _greedy(self, batch: Batch, hidden: Tensor, logit_rows: Sequence[LogitRows], result: StepResult) -> bool:
        """Whether the step needs nothing but maxima, and the model has found them without the logits."""
        masked: dict[int, SampleRow] = {}  # by the row of `hidden`
        for item, at in zip(batch.items, logit_rows, strict=True):
            if item.wants_prompt_logprobs:
                return False
            if not item.wants_sample:
                continue
            # A fork follows a grammar of its own, though from the same row.
            if asks_for_masked_argmax(item.sampling) and not item.forks:
                masked[at.first] = SampleRow.of(item, item.sequence_id, item.choice, at.first)
            elif not asks_for_argmax(item.sampling):
                return False
        allowed = self._sampler.constraints.allowed(list(masked.values()), self._vocab_size) if masked else None
        found = self._decoder.greedy(hidden, None if allowed is None else allowed.words(masked, len(hidden)))
        if found is None:
            return False
        tokens = [(_greatest(token, finite),) for token, finite in zip(*found, strict=True)]
        for item, at in zip(batch.items, logit_rows, strict=True):
            if item.wants_sample:
                result.samples[item.sequence_id] = tokens[at.first]
                for fork in item.forks:
                    result.samples[fork.sequence_id] = tokens[at.first]
        if allowed is not None:
            for i, (at_row, row) in enumerate(masked.items()):
                error = allowed.errors.get(i)
                result.samples[row.sequence_id] = (
                    self._sampler.with_forced(row, tokens[at_row][0]) if error is None else (SampledToken(error=error),)
                )
        if not all(found[1]):
            wrong = (number for number, samples in result.samples.items() if samples[0].error == NON_FINITE)
            result.non_finite.update(wrong)
        return True

    def _check_ids(self, item: ScheduledSequence) -> None:
        """A GPU answers an index out of range by ending the process, so it must not get that far."""
        ids = item.token_ids
        if item.wants_prompt_logprobs:
            ids += item.prompt_token_ids[item.end : item.end + 1]  # scored by the last row
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {self._vocab_size}")

    def _plan_slices(self, batch: Batch, logit_rows: Sequence[LogitRows], num_rows: int) -> list[_Pending]:
        """What to sample and to score, by the slice of logits it needs."""
        slices = [_Pending() for _ in range(-(-num_rows // self._logits_rows))]
        for item, at in zip(batch.items, logit_rows, strict=True):
            if item.wants_prompt_logprobs:
                for i in range(min(item.end, item.num_prompt_tokens - 1) - item.start):
                    index, row = divmod(at.first + i, self._logits_rows)
                    pending = slices[index]
                    pending.score_rows.append(row)
                    pending.score_ids.append(item.prompt_token_ids[item.start + i + 1])
                    pending.score_items.append(item)
            if item.wants_sample:
                index, row = divmod(at.first + at.count - 1, self._logits_rows)
                pending = slices[index]
                choices = [(item.sequence_id, item.choice), *((f.sequence_id, f.choice) for f in item.forks)]
                for sequence_id, choice in choices:
                    pending.sequence_ids.append(sequence_id)
                    pending.rows.append(SampleRow.of(item, sequence_id, choice, row))
        return slices

    def _score(
        self, logits: Tensor, pending: _Pending, scores: dict[int, list[TokenLogprobs]], result: StepResult
    ) -> None:
        if not pending.score_rows:
            return
        rows = torch.tensor(pending.score_rows, device=logits.device)
        num_top = max(item.sampling.num_prompt_logprobs or 0 for item in pending.score_items)
        scored = self._sampler.score(logits[rows], pending.score_ids, num_top)
        for item, entry in zip(pending.score_items, scored, strict=True):
            if entry is None:
                result.errors[item.sequence_id] = NON_FINITE
                result.non_finite.add(item.sequence_id)
                continue
            wanted = item.sampling.num_prompt_logprobs or 0
            scores[item.sequence_id].append(
                replace(entry, top_ids=entry.top_ids[:wanted], top_logprobs=entry.top_logprobs[:wanted])
            )


def _greatest(token_id: int, is_finite: bool) -> SampledToken:
    if not is_finite:
        return SampledToken(error=NON_FINITE)
    return SampledToken(token_id=token_id) if token_id >= 0 else SampledToken(error=NO_CANDIDATE)

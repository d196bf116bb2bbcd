"""Computes a step where the host waits for it: the model, then the sampler or the kernels' own maximum.

Promises: logits take a bounded amount of memory. Must not know: queues, the allocator, requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quire_engine.contract.batch import Batch, StepResult
from quire_engine.execution.adapters import AdapterCache
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.finishing import Finisher, HostSections, Span, spans
from quire_engine.execution.logit_rules import asks_for_masked_argmax
from quire_engine.execution.model_input import ModelInput, host_tensor, model_input
from quire_engine.execution.models.served import ModelFacts
from quire_engine.execution.sampler import Chosen, Sampler
from quire_engine.execution.step_tensors import StepTensors, step_tensors

LOGITS_BYTES = 64 << 20  # most float32 logits materialised at once
_OnHost = tuple[list[int], list[bool], list[bool]]  # `Chosen`, copied


class Model(Protocol):
    """The part of `models.decoder.Decoder` that a step uses."""

    @property
    def config(self) -> ModelFacts: ...
    def forward(self, step: ModelInput, kv: Tensor) -> Tensor: ...
    def normed(self, hidden: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def greedy(self, hidden: Tensor, allowed: Tensor | None) -> tuple[list[int], list[bool]] | None: ...


@dataclass(frozen=True, slots=True)
class Computed:
    """A step whose result is there."""

    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result


class Runner:
    """Owns references to the weights and the KV pool, and nothing of a step when it is over."""

    max_in_flight = 1

    def __init__(
        self,
        decoder: Model,
        kv: Tensor,
        block_size: int,
        device: torch.device,
        *,
        grammars: Grammars | None = None,
        adapters: AdapterCache | None = None,
        logits_bytes: int = LOGITS_BYTES,
    ) -> None:
        """`kv`: the pool, as the kernels lay it out. Without `grammars` or `adapters` requests for them fail."""
        self._decoder, self._kv, self._block_size, self._device = decoder, kv, block_size, device
        self._adapters = adapters
        self._constraints, self._sampler = Constraints(grammars), Sampler()
        self._vocab_size = decoder.config.vocab_size
        self._logits_rows = max(1, logits_bytes // (4 * self._vocab_size))

    def work(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def begin(self, batch: Batch, *, graphs: bool = True) -> Computed:
        del graphs  # there are none
        return Computed(self._compute(batch))

    def in_parts(self, batch: Batch) -> Callable[[Batch, int], StepResult]:
        del batch
        return lambda part, _: self._compute(part)

    def release(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def capture_largest(self) -> None:
        """Do nothing: this runner has no graphs."""

    def choose_launches(self) -> None:
        """The kernels' own choice stays."""

    def capture_next(self) -> int:
        """Return 0: this runner has no graphs to capture."""
        return 0

    def _compute(self, batch: Batch) -> StepResult:
        step = step_tensors(batch, self._block_size, self._vocab_size, self._constraints.possible)
        if step.pending:
            raise ValueError(f"the step before samples no token of sequence {next(iter(step.pending.values()))}")
        rows = model_input(step, self._block_size, self._device)
        if step.adapters:
            if self._adapters is None:
                raise ValueError("a request has an adapter, and there are none")
            rows = replace(rows, adapters=self._adapters.of_step(step))
        hidden = self._decoder.forward(rows, self._kv)  # [S, H]
        finisher = Finisher(self._decoder, step, HostSections(step.asked(), self._device), self._constraints)
        hidden = finisher.pool(hidden)
        found = self._greatest(step, hidden, finisher) or self._choose(step, hidden, finisher)
        columns = finisher.columns()
        told = None if columns is None else columns.cpu().numpy().data.cast("B")
        return finisher.finished().read(*found, told)

    def _greatest(self, step: StepTensors, hidden: Tensor, finisher: Finisher) -> _OnHost | None:
        """The maxima, where the step needs nothing else and the model finds them without the logits."""
        if not step.choices or step.draws or step.told or step.scored:
            return None
        rows = step.choice_rows
        for i, row in step.rules.items():
            # Two choices from one row follow a grammar each, and the kernel takes one mask a row.
            if not asks_for_masked_argmax(row.sampling) or row.logits_row in {*rows[i - 1 : i], *rows[i + 1 : i + 2]}:
                return None
            if row.opener is not None:  # the maxima with and without the mask are asked for, once in a request
                return None
        ruled = finisher.ruled(Span.whole(step))
        allowed = None if ruled is None else ruled.allowed.words([row.logits_row for row in ruled.rows], len(hidden))
        found = self._decoder.greedy(hidden, allowed)
        if found is None:
            return None
        tokens, finite = found
        return [tokens[row] for row in rows], [finite[row] for row in rows], [tokens[row] >= 0 for row in rows]

    def _choose(
        self, step: StepTensors, hidden: Tensor, finisher: Finisher
    ) -> tuple[list[int], list[bool], list[bool]]:
        """A token of every choice from its logits; nothing is waited for until the last is chosen."""
        parts: list[Chosen] = []
        for span in spans(step, self._logits_rows):
            logits = self._decoder.logits(hidden[span.rows])  # [s, V] float32
            rows = array("q", (row - span.rows.start for row in step.choice_rows[span.choices]))
            failed = [i - span.choices.start for i in step.errors]
            chosen = self._sampler.choose(logits, rows, step.choices[span.choices], finisher.ruled(span), failed)
            finisher.finish(span, logits, host_tensor(rows, self._device), chosen.ids)
            parts.append(chosen)
        if not parts:
            return [], [], []
        ids, finite, possible = (torch.cat(column).tolist() for column in zip(*parts, strict=True))
        return ids, finite, possible

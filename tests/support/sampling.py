"""What a step's sampler and its finishing make of given logits, without a model.

Promises: the objects of the runners and nothing beside them. Must not know: sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from quire_engine.contract.batch import SampledToken, StepResult
from quire_engine.contract.types import SamplingParams, TokenLogprobs
from quire_engine.execution import distribution
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.finishing import Finisher, HostSections, Span
from quire_engine.execution.logit_rules import SampleRow
from quire_engine.execution.sampler import Sampler
from quire_engine.execution.step_tensors import StepTensors
from support.model_steps import scheduled


def sample(
    logits: Tensor,
    rows: Sequence[SampleRow],
    *,
    slice_bytes: int = distribution.SLICE_BYTES,
    grammars: Grammars | None = None,
) -> list[SampledToken]:
    """The next token of each of `rows`, from logits [S, V]."""
    step = StepTensors()
    for i, row in enumerate(rows):
        step.add_choice(row._replace(sequence_id=i), logits.shape[1])
    result = _finished(step, logits, slice_bytes, grammars)
    return [result.samples[i][0] for i in range(len(rows))]


def score(
    logits: Tensor, token_ids: Sequence[int], num_top: int, *, slice_bytes: int = distribution.SLICE_BYTES
) -> list[TokenLogprobs | None]:
    """Log-probabilities of `token_ids[i]` under row i of logits [S, V]; None where the row is not finite."""
    found: list[TokenLogprobs | None] = []
    for i, token in enumerate(token_ids):  # of sequences of their own: one bad row costs its sequence all its scores
        step = StepTensors(scored=[0])
        item = replace(scheduled([0, token], [0], 0, 2), sampling=SamplingParams(num_prompt_logprobs=num_top))
        step.add_score(item, i, token)
        found.append(next(iter(_finished(step, logits, slice_bytes).prompt_logprobs.get(0, ())), None))
    return found


def _finished(step: StepTensors, logits: Tensor, slice_bytes: int, grammars: Grammars | None = None) -> StepResult:
    vocab_size, everything = logits.shape[1], slice(0, len(logits))
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocab_size))
    span = Span(
        rows=everything,
        choices=slice(0, len(step.choices)),
        told=slice(0, len(step.told)),
        scores=slice(0, len(step.score_rows)),
    )
    sections = HostSections(step.asked(), logits.device)
    finisher = Finisher(model, step, sections, Constraints(grammars), slice_bytes=slice_bytes)  # type: ignore[arg-type]
    ids = finite = possible = torch.empty(0)
    if step.choices:
        ruled = finisher.ruled(span)
        ids, finite, possible = Sampler(slice_bytes).choose(logits, step.choice_rows, step.choices, ruled, step.errors)
    rows = torch.tensor(step.choice_rows.tolist(), dtype=torch.int64, device=logits.device)
    finisher.finish(span, logits, rows, ids)
    columns = finisher.columns()
    told = None if columns is None else columns.cpu().numpy().data.cast("B")
    return finisher.finished().read(ids.tolist(), finite.tolist(), possible.tolist(), told)

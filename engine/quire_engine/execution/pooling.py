"""The rows of a prompt whose vector is wanted: after the final norm, summed.

Promises: sums that do not depend on their order, so neither on the batch, nor on how the prompt was cut, nor on the
device's way to add: every value is rounded to a whole number of small units first. Must not know: requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from quire_engine.batch import POOLED_BITS, Batch, ScheduledSequence, StepResult
from quire_engine.execution.model_input import LogitRows
from quire_engine.execution.sampler import NON_FINITE

# Of one value. Behind a norm they are a few thousand at most; 2^17 rows of such values fit 64 bits in units.
MOST = float(1 << 13)
_ROWS = 256  # at once, in float64


class Normed(Protocol):
    """The part of `models.decoder.Decoder` that pooling uses; the runners' models of tests have it too."""

    def normed(self, hidden: Tensor) -> Tensor: ...


def pooled_columns(model: Normed, hidden: Tensor) -> Tensor:
    """[H + 1] int64 on the device, waited for by nobody: the sum of the rows [R, H], and how many values it lacks."""
    columns = torch.zeros(hidden.shape[1] + 1, dtype=torch.int64, device=hidden.device)
    for start in range(0, len(hidden), _ROWS):
        values = model.normed(hidden[start : start + _ROWS])
        counted = values.abs() < MOST  # false for what is not a number
        units = torch.where(counted, values * float(1 << POOLED_BITS), 0.0).round().to(torch.int64)
        columns[:-1] += units.sum(dim=0)
        columns[-1] += (~counted).sum()
    return columns


def read_columns(item: ScheduledSequence, columns: Sequence[int], result: StepResult) -> None:
    """Put one item's columns into the step's result."""
    *sums, num_lacking = columns
    if num_lacking:
        result.errors[item.sequence_id] = NON_FINITE
        result.non_finite.add(item.sequence_id)
    else:
        result.pooled[item.sequence_id] = tuple(sums)


def take_pooled(
    model: Normed, batch: Batch, logit_rows: Sequence[LogitRows], hidden: Tensor, result: StepResult
) -> tuple[Batch, tuple[LogitRows, ...], Tensor]:
    """Pool the items that ask for it, into `result`; returns the others with their hidden states and rows of them.

    What is pooled has no logits: the head, which is most of a small model, is not multiplied with it.
    """
    items: list[ScheduledSequence] = []
    rows: list[LogitRows] = []
    parts: list[Tensor] = [hidden[:0]]
    first = 0
    for item, at in zip(batch.items, logit_rows, strict=True):
        part = hidden[at.first : at.first + at.count]
        if item.pooling:
            read_columns(item, pooled_columns(model, part).tolist(), result)
            continue
        items.append(item)
        rows.append(LogitRows(first=first, count=at.count))
        parts.append(part)
        first += at.count
    return replace(batch, items=tuple(items)), tuple(rows), torch.cat(parts)

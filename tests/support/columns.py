"""Batches and results with plain decodes in columns, made of those without.

Promises: what is plain is told from the slice alone. Must not know: the scheduler, the executors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire_engine.contract.batch import Batch, SampledToken, ScheduledSequence, StepResult
from quire_engine.contract.decodes import BatchInColumns, DecodeRow, Decodes


class Columns:
    """Makes batches in columns; the rows are the same tuple while they are the same, as the scheduler's are."""

    def __init__(self) -> None:
        self._rows: tuple[DecodeRow, ...] = ()

    def of(self, batch: Batch) -> Batch:
        """The batch with its plain decodes in columns, if it has some."""
        plain = [item for item in batch.items if _is_plain(item)]
        if not plain:
            return batch
        rows = tuple([_row(item) for item in plain])
        if rows != self._rows:
            self._rows = rows
        behind, others = [], []
        for item in batch.items:
            if not _is_plain(item):
                others.append(item)
                behind.append(sum(map(_is_plain, batch.items[: batch.items.index(item)])))
        width = max(len(item.block_ids) for item in plain)
        anything = 3  # no block of the row's own: nobody reads it
        tables = [[*item.block_ids, *[anything] * (width - len(item.block_ids))] for item in plain]
        found = BatchInColumns(
            decodes=Decodes(
                rows=self._rows,
                sequence_ids=_column([item.sequence_id for item in plain]),
                token_ids=_column([item.token_ids[0] for item in plain]),
                positions=_column([item.start for item in plain]),
                block_ids=tuple([item.block_ids for item in plain]),
                tables=np.array(tables, dtype=np.int32),
                draws=any(item.sampling.temperature != 0.0 for item in plain),
                places=_column(range(len(plain))),
                tenures=_column([0] * len(plain)),
            ),
            others=tuple(others),
            behind=behind,
            step_id=batch.step_id,
            num_tokens=batch.num_tokens,
            num_decodes=batch.num_decodes,
            swap_out=batch.swap_out,
            swap_in=batch.swap_in,
            swap_keys=batch.swap_keys,
            copies=batch.copies,
            released=batch.released,
        )
        assert found.items == batch.items
        return found


def flat(batch: Batch, result: StepResult) -> StepResult:
    """The result as it is without columns."""
    if result.decoded is None:
        return result
    assert isinstance(batch, BatchInColumns)
    samples = dict(result.samples)
    for row, token_id in zip(batch.decodes.rows, result.decoded, strict=True):
        assert (token_id < 0) == (row.sequence_id in samples)
        if token_id >= 0:
            samples[row.sequence_id] = (SampledToken(token_id=int(token_id)),)
    return replace(result, decoded=None, samples=samples)


def _row(item: ScheduledSequence) -> DecodeRow:
    return DecodeRow(item.sequence_id, item.choice, item.run, item.prompt_token_ids, item.sampling, item.stop)


def _is_plain(item: ScheduledSequence) -> bool:
    sampling = item.sampling
    is_alone = item.is_decode and item.wants_sample and not (item.num_drafts or item.forks or item.pooling)
    has_rules = sampling.reads_output or sampling.logit_bias or sampling.allowed_token_ids or sampling.banned_token_ids
    return is_alone and not has_rules and not sampling.min_tokens and sampling.num_logprobs is None


def _column(values: object) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]

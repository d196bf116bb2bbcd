"""A batch as tensors.

Promises: rows in batch order; one host-to-device transfer per tensor, no Python loop over tokens. Must not know:
sampling.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from quire_engine.batch import Batch, ScheduledSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """B sequences with T rows in all, as attention sees them. The `*_lens` tuples are on the host."""

    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64, block_id * block_size + offset
    query_starts: Tensor  # [B + 1] int32
    context_lens: Tensor  # [B] int32, tokens present after this step
    block_tables: Tensor  # [B, M] int32, padded with 0
    query_lens: tuple[int, ...]  # B rows per sequence
    kv_lens: tuple[int, ...]  # B, context_lens
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput(Rows):
    """A step: all its rows, S of which need logits."""

    input_ids: Tensor  # [T] int64
    sample_rows: Tensor  # [S] int64, ascending: rows whose logits are needed
    sampled: Rows | None  # the same sequences with those rows alone; None: they are all rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRows:
    """Where one item's logits are: rows `first : first + count` of the [S, V] logits."""

    first: int
    count: int


def build_model_input(batch: Batch, block_size: int, device: torch.device) -> tuple[ModelInput, tuple[LogitRows, ...]]:
    """The tensors of a step, and for each item of the batch its rows of logits.

    An item that wants prompt log-probabilities, or is pooled whole, gets a row for every row of its slice, else one
    that wants a sample or is pooled at its end gets its last row's, else none.
    """
    input_ids, positions, slots, samples = array("q"), array("q"), array("q"), array("q")
    starts, query_lens, kv_lens, logit_rows = [0], [], [], []
    for item in batch.items:
        num_tokens = item.num_tokens
        query_lens.append(num_tokens)
        starts.append(starts[-1] + num_tokens)
        kv_lens.append(item.start + num_tokens)
        if num_tokens == 1:  # a decode: most items of most steps
            index, offset = divmod(item.start, block_size)
            input_ids.append(item.token_ids[0])
            positions.append(item.start)
            slots.append(item.block_ids[index] * block_size + offset)
        else:
            input_ids.extend(item.token_ids)
            positions.extend(range(item.start, item.end))
            extend_slots(slots, item, block_size)
        count = item.num_last_rows
        logit_rows.append(LogitRows(first=len(samples), count=count))
        samples.extend(range(starts[-1] - count, starts[-1]))

    most = max(kv_lens, default=0)
    width = -(-most // block_size)
    tables = array("i")
    for item, kv_len in zip(batch.items, kv_lens, strict=True):
        used = -(-kv_len // block_size)
        tables.extend(item.block_ids[:used])
        tables.extend((0,) * (width - used))
    step = ModelInput(
        input_ids=_tensor(input_ids, device),
        positions=_tensor(positions, device),
        kv_slots=_tensor(slots, device),
        query_starts=_tensor(array("i", starts), device),
        context_lens=_tensor(array("i", kv_lens), device),
        block_tables=_tensor(tables, device).view(len(kv_lens), width),
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        max_query_len=max(query_lens, default=0),
        max_context_len=most,
        sample_rows=_tensor(samples, device),
        sampled=None,
    )
    if len(samples) < len(input_ids):
        step = replace(step, sampled=_sampled(step, tuple(at.count for at in logit_rows)))
    return step, tuple(logit_rows)


def _sampled(step: ModelInput, counts: tuple[int, ...]) -> Rows:
    """The step's sample rows alone, which are the last `counts` of each sequence."""
    return Rows(
        positions=step.positions[step.sample_rows],
        kv_slots=step.kv_slots[step.sample_rows],
        query_starts=_tensor(array("i", accumulate(counts, initial=0)), step.positions.device),
        context_lens=step.context_lens,
        block_tables=step.block_tables,
        query_lens=counts,
        kv_lens=step.kv_lens,
        max_query_len=max(counts, default=0),
        max_context_len=step.max_context_len,
    )


def extend_slots(slots: array[int], item: ScheduledSequence, block_size: int) -> None:
    """Append the slots of the item's slice, block by block."""
    for index in range(item.start // block_size, -(-item.end // block_size)):
        base = item.block_ids[index] * block_size
        low = max(item.start - index * block_size, 0)
        high = min(item.end - index * block_size, block_size)
        slots.extend(range(base + low, base + high))


def _tensor(values: array[int], device: torch.device) -> Tensor:
    dtype = torch.int64 if values.typecode == "q" else torch.int32
    if not values:  # frombuffer refuses an empty buffer
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(values, dtype=dtype).to(device)

"""A step's rows as tensors: what the model's layers take.

Promises: rows in batch order; one host-to-device transfer per tensor, no Python loop over tokens. Must not know:
sampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import sub

import torch
from torch import Tensor

from quire_engine.execution.step_tensors import StepTensors
from quire_kernels.kernel_set import AttentionRows, StepAdapters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput(AttentionRows):
    """A step: all its rows, S of which need logits."""

    input_ids: Tensor  # [T] int64
    sample_rows: Tensor  # [S] int64, ascending: rows whose logits are needed
    sampled: AttentionRows | None  # the same sequences with those rows alone; None: they are all rows
    # For a model that keeps a state of its own for each sequence.
    sequence_ids: tuple[int, ...] = ()  # B
    forks: tuple[tuple[int, ...], ...] = ()  # B, sequences that go on from each one's last row
    released: tuple[int, ...] = ()  # sequences that ended or must begin anew
    adapters: StepAdapters | None = None  # of the rows; None: no row has one
    single_ops: bool = False  # also where the kernels have layers of decodes in fewer launches


def model_input(step: StepTensors, block_size: int, device: torch.device) -> ModelInput:
    """The tensors of a step, none of whose tokens is pending."""
    query_lens, kv_lens = lengths(step.query_starts), tuple(step.context_lens)
    most = max(kv_lens, default=0)
    found = ModelInput(
        input_ids=host_tensor(step.ids, device),
        positions=host_tensor(step.positions, device),
        kv_slots=host_tensor(step.kv_slots, device),
        query_starts=host_tensor(step.query_starts, device),
        context_lens=host_tensor(step.context_lens, device),
        block_tables=_tables_of(step, kv_lens, block_size, device),
        query_lens=query_lens,
        kv_lens=kv_lens,
        max_query_len=max(query_lens, default=0),
        max_context_len=most,
        sample_rows=host_tensor(step.sample_rows, device),
        sampled=None,
        sequence_ids=_sequence_ids(step),
        forks=((),) * step.num_decodes
        + tuple([tuple([fork.sequence_id for fork in item.forks]) for item in step.items]),
        released=step.released,
    )
    if step.other_slots:
        found = replace(found, others=tuple(_others(found, step, block_size)))
    return (
        replace(found, sampled=_sampled(found, step, found.sample_rows))
        if len(step.sample_rows) < step.num_rows
        else found
    )


def _sequence_ids(step: StepTensors) -> tuple[int, ...]:
    ids = () if step.decodes is None else tuple(step.decodes.sequence_ids.tolist())
    return ids + tuple([item.sequence_id for item in step.items])


def _tables_of(step: StepTensors, kv_lens: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """[B, M] int32: as `_tables`, but that anything may lie behind the blocks of a decode in columns."""
    blocks, count = [item.block_ids for item in step.items], step.num_decodes
    if step.decodes is None:
        return _tables(blocks, kv_lens, size, device)
    width = -(-max(kv_lens) // size)
    known = torch.from_numpy(step.decodes.tables)[:, :width]
    tables = torch.zeros(len(kv_lens), width, dtype=torch.int32)
    tables[:count, : known.shape[1]] = known
    others = _tables(blocks, kv_lens[count:], size, torch.device("cpu"))
    tables[count:, : others.shape[1]] = others
    return tables.to(device)


def _tables(blocks: Sequence[tuple[int, ...]], kv_lens: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """[B, M] int32: the blocks of each sequence that its step reads or writes, padded with 0."""
    width = -(-max(kv_lens, default=0) // size)
    tables = array("i")
    for block_ids, kv_len in zip(blocks, kv_lens, strict=True):
        used = -(-kv_len // size)
        tables.extend(block_ids[:used])
        tables.extend((0,) * (width - used))
    return host_tensor(tables, device).view(len(kv_lens), width)


def _others(found: ModelInput, step: StepTensors, block_size: int) -> Iterator[AttentionRows]:
    """The rows in the blocks of the other groups of layers."""
    device = found.positions.device
    for group, slots in enumerate(step.other_slots):
        blocks = [item.other_block_ids[group] for item in step.items]
        yield AttentionRows(
            positions=found.positions,
            kv_slots=host_tensor(slots, device),
            query_starts=found.query_starts,
            context_lens=found.context_lens,
            block_tables=_tables(blocks, found.kv_lens, block_size, device),
            query_lens=found.query_lens,
            kv_lens=found.kv_lens,
            max_query_len=found.max_query_len,
            max_context_len=found.max_context_len,
        )


def _sampled(found: AttentionRows, step: StepTensors, rows: Tensor) -> AttentionRows:
    """The step's sample rows alone, which are the last ones of each sequence."""
    counts = lengths(step.sampled_starts)
    return AttentionRows(
        others=tuple([_sampled(other, step, rows) for other in found.others]),
        positions=found.positions[rows],
        kv_slots=found.kv_slots[rows],
        query_starts=host_tensor(step.sampled_starts, found.positions.device),
        context_lens=found.context_lens,
        block_tables=found.block_tables,
        query_lens=counts,
        kv_lens=found.kv_lens,
        max_query_len=max(counts, default=0),
        max_context_len=found.max_context_len,
    )


def lengths(starts: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sub, starts[1:], starts))


def host_tensor(values: array[int], device: torch.device) -> Tensor:
    """[n] int64 or int32, by the array's type; on the host the same memory."""
    dtype = torch.int64 if values.typecode == "q" else torch.int32
    if not values:  # frombuffer refuses an empty buffer
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(values, dtype=dtype).to(device)

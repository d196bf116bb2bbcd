"""The messages from rank 0 to the other ranks, as bytes: a step's rows, rows for the head, blocks to copy, adapters.

Promises: no pickle; a decoded message has the tensors of the encoded one. Must not know: processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.execution.model_input import ModelInput, lengths
from quire_kernels.kernel_set import AdapterSites, AttentionRows, StepAdapters

_DTYPES = (torch.int64, torch.int32, torch.bfloat16, torch.float32)
_PAD = 8  # bytes at a multiple of which each tensor begins


class Kind(IntEnum):
    """The order in a message."""

    END = 0  # nothing more
    STEP = 1  # the layers of a step
    LOGITS = 2  # the head, of hidden states
    GREEDY = 3  # the same, for the greatest columns; the second tensor, if there is one, allows some alone
    COPY = 4  # whole blocks of the pool
    ADAPTER = 5  # keep an adapter under a number, the first tensor
    FORGET = 6  # drop those of these numbers


class Message(NamedTuple):
    """One order and its tensors."""

    kind: Kind
    tensors: tuple[Tensor, ...] = ()

    def encode(self) -> bytes:
        head = array("q", [self.kind, len(self.tensors)])
        parts = []
        for tensor in self.tensors:
            head.extend([_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape])
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            parts.append(data + bytes(-len(data) % _PAD))
        return array("q", [len(head)]).tobytes() + head.tobytes() + b"".join(parts)


def decode(data: bytes) -> Message:
    """The message of these bytes, which `Message.encode` made."""
    memory = bytearray(data)  # torch wants memory that may be written
    size = int.from_bytes(memory[:8], "little")
    head = array("q", bytes(memory[8 : 8 + 8 * size]))
    kind, count, *described = head
    tensors, at = [], 8 + 8 * size
    for _ in range(count):
        dtype, dims, *described = described
        shape, described = described[:dims], described[dims:]
        tensor = torch.empty(shape, dtype=_DTYPES[dtype])
        if tensor.numel():
            tensor = torch.frombuffer(memory, dtype=_DTYPES[dtype], offset=at, count=tensor.numel()).view(shape)
        tensors.append(tensor)
        at += -(-tensor.nbytes // _PAD) * _PAD
    return Message(Kind(kind), tuple(tensors))


def told_step(step: ModelInput, adapters: Sequence[int] = (), *, has_states: bool = False) -> Message:
    """A step of a model. `has_states`: it keeps a state of its own for each sequence.

    `adapters`: the numbers by which the other ranks know the adapters of the step, in their order.
    """
    slots = torch.empty(0, dtype=torch.int32) if step.adapters is None else step.adapters.slots
    groups = [step, *step.others]
    starts = step.query_starts if step.sampled is None else step.sampled.query_starts
    tensors = [step.input_ids, step.positions, step.query_starts, step.context_lens, step.sample_rows, starts]
    tensors += [slots, torch.tensor(adapters, dtype=torch.int64)]
    named = [step.sequence_ids, step.released, *step.forks] if has_states else []
    tensors.append(torch.tensor([number for ids in named for number in (len(ids), *ids)], dtype=torch.int64))
    for group in groups:
        tensors += [group.kv_slots, group.block_tables]
    return Message(Kind.STEP, tuple(tensors))


def step_of(message: Message, adapters: Mapping[int, AdapterSites]) -> ModelInput:
    """The step that `told_step` told. `adapters`: those that are kept, by number."""
    ids, positions, query_starts, context_lens, sample_rows, sampled_starts, *rest = message.tensors
    slots, numbers, states, *groups = rest
    sequence_ids, released, *forks = _lists(states.tolist()) if len(states) else ((), ())
    kv_lens = tuple(context_lens.tolist())

    def rows_of(starts: Tensor, chosen: Tensor | None) -> AttentionRows:
        counts = lengths(starts.tolist())

        def in_group(slots: Tensor, tables: Tensor, others: Sequence[AttentionRows] = ()) -> AttentionRows:
            return AttentionRows(
                positions=positions if chosen is None else positions[chosen],
                kv_slots=slots if chosen is None else slots[chosen],
                query_starts=starts,
                context_lens=context_lens,
                block_tables=tables,
                query_lens=counts,
                kv_lens=kv_lens,
                max_query_len=max(counts, default=0),
                max_context_len=max(kv_lens, default=0),
                others=tuple(others),
            )

        pairs = list(zip(groups[::2], groups[1::2], strict=True))
        return in_group(*pairs[0], others=[in_group(*pair) for pair in pairs[1:]])

    whole = rows_of(query_starts, None)
    return ModelInput(
        input_ids=ids,
        sample_rows=sample_rows,
        sampled=rows_of(sampled_starts, sample_rows) if len(sample_rows) < len(ids) else None,
        positions=whole.positions,
        kv_slots=whole.kv_slots,
        query_starts=whole.query_starts,
        context_lens=whole.context_lens,
        block_tables=whole.block_tables,
        query_lens=whole.query_lens,
        kv_lens=whole.kv_lens,
        max_query_len=whole.max_query_len,
        max_context_len=whole.max_context_len,
        others=whole.others,
        sequence_ids=sequence_ids,
        forks=tuple(forks),
        released=released,
        adapters=StepAdapters(slots=slots, adapters=tuple([adapters[number] for number in numbers.tolist()]))
        if len(numbers)
        else None,
    )


def _lists(values: list[int]) -> Iterator[tuple[int, ...]]:
    """Numbers of which each list has its length before it."""
    at = 0
    while at < len(values):
        end = at + 1 + values[at]
        yield tuple(values[at + 1 : end])
        at = end

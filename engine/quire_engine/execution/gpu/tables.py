"""Tables that stay on a device between steps: each sequence's block table and sampling parameters.

Promises: a step sends only the changes; after `forget` everything is sent again. A sequence of the step being
built never loses its slot.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.contract.decodes import DecodeRow, Decodes
from quire_engine.contract.types import SamplingParams
from quire_engine.execution.gpu.device import Packed
from quire_engine.execution.logit_rules import draws
from quire_kernels.kernel_set import ChoiceRows

# Bits of a row's sampling parameters that decide what choosing its token launches.
DRAWS, LIMITS_K, LIMITS_P = 1, 2, 4
ADAPTED = 8  # of a step: some row has an adapter, which the layers' launches depend on


@dataclass(slots=True)
class _Held:
    """One slot's sequence, as the device has it once the deltas taken so far have arrived."""

    slot: int
    step: int  # the last that used it
    choice: int
    sampling: SamplingParams
    flags: int
    block_ids: tuple[int, ...] = ()


class SlotTables:
    """Owns the tables on the device and the host's record of their content.

    `blocks` [slots + 1, max_blocks] int32, `words` [3, slots + 1] int64 (seed, choice, top_p's bits) and `halves`
    [3, slots + 1] int32 (the bits of temperature and min_p, top_k). The last slot is `spare`: its table leads to
    `spare_block` alone, and it takes the maximum.
    """

    def __init__(
        self, *, num_slots: int, max_blocks: int, vocab_size: int, spare_block: int, device: torch.device
    ) -> None:
        self.max_blocks = max_blocks
        self.spare = num_slots
        self.blocks = torch.zeros(num_slots + 1, max_blocks, dtype=torch.int32, device=device)
        self.blocks[num_slots].fill_(spare_block)
        self.words = torch.zeros(3, num_slots + 1, dtype=torch.int64, device=device)
        self.halves = torch.zeros(3, num_slots + 1, dtype=torch.int32, device=device)
        self._vocab_size = vocab_size
        self._held: dict[int, _Held] = {}  # by sequence id, least recently used first
        self._free = list(range(num_slots))
        self._step = 0
        # The decodes in columns that were found last: while they are the same, their slots are.
        self._rows: tuple[DecodeRow, ...] = ()
        self._held_rows: list[_Held] = []
        self._rows_step = -1  # the step that they were of
        self._row_slots: tuple[array[int], int] = array("q"), 0
        self._cells, self._cell_blocks, self._chosen = _new_deltas()

    def begin(self) -> None:
        """A step begins: the sequences of the one before may lose their slots."""
        self._step += 1

    def find(self, sequence_id: int, choice: int, sampling: SamplingParams) -> tuple[int, int]:
        """The slot of a sequence of this step and its flags."""
        held = self._held.pop(sequence_id, None)
        if held is None:
            held = self._take(choice, sampling)
        elif held.sampling is not sampling and (held.sampling, held.choice) != (sampling, choice):
            held = self._held_by(held.slot, choice, sampling, held.block_ids)
        held.step = self._step
        self._held[sequence_id] = held
        return held.slot, held.flags

    def find_rows(self, decodes: Decodes) -> tuple[array[int], int]:
        """Find and place each row of the columns; return the slots, and the flags of all."""
        if self._rows is not decodes.rows or self._rows_step != self._step - 1:
            self._rows_step, slots, flags = -1, array("q"), 0
            for row in decodes.rows:  # first those that have slots, which must not lose them to the others
                if row.sequence_id in self._held:
                    self.find(row.sequence_id, row.choice, row.sampling)
            for row in decodes.rows:
                slot, own = self.find(row.sequence_id, row.choice, row.sampling)
                slots.append(slot)
                flags |= own
            self._rows, self._row_slots = decodes.rows, (slots, flags)
            self._held_rows = [self._held[row.sequence_id] for row in decodes.rows]
        self._rows_step = self._step
        for held, block_ids in zip(self._held_rows, decodes.block_ids, strict=True):
            if held.block_ids is not block_ids:
                self._place(held, block_ids)
        return self._row_slots

    def place(self, sequence_id: int, block_ids: tuple[int, ...]) -> None:
        """The blocks of a sequence that has been found. ValueError for more than a table holds."""
        self._place(self._held[sequence_id], block_ids)

    def _place(self, held: _Held, block_ids: tuple[int, ...]) -> None:
        known = held.block_ids
        if block_ids is known or block_ids == known:
            return
        if len(block_ids) > self.max_blocks:
            raise ValueError(f"{len(block_ids)} blocks are more than the {self.max_blocks} of a table")
        row, both = held.slot * self.max_blocks, min(len(known), len(block_ids))
        if known[:both] != block_ids[:both]:
            for index in range(both):
                if known[index] != block_ids[index]:
                    self._cells.append(row + index)
                    self._cell_blocks.append(block_ids[index])
        self._cells.extend(range(row + both, row + len(block_ids)))
        self._cell_blocks.extend(block_ids[both:])
        held.block_ids = block_ids

    def take_deltas(self) -> dict[str, array[int]]:
        """The changes since the last call, for `apply`. Empty sections are left out."""
        deltas: dict[str, array[int]] = {}
        if self._cells:
            deltas |= {"cells": self._cells, "cell_blocks": self._cell_blocks}
        if self._chosen:
            slots, words, halves = zip(*self._chosen.values(), strict=True)
            deltas["set_slots"] = array("q", slots)
            deltas["set_words"] = array("q", [word for column in zip(*words, strict=True) for word in column])
            deltas["set_halves"] = array("i", [half for column in zip(*halves, strict=True) for half in column])
        self._cells, self._cell_blocks, self._chosen = _new_deltas()
        return deltas

    def apply(self, packed: Packed) -> None:
        """Issue the updates of the tables."""
        if "cells" in packed.sections:
            self.blocks.view(-1).index_copy_(0, packed["cells"], packed["cell_blocks"])
        if "set_slots" in packed.sections:
            slots = packed["set_slots"]
            self.words.index_copy_(1, slots, packed["set_words"].view(3, -1))
            self.halves.index_copy_(1, slots, packed["set_halves"].view(3, -1))

    def block_rows(self, slots: Tensor, width: int) -> Tensor:
        """The first `width` blocks of each slot's sequence: [n, width] int32, contiguous."""
        return self.blocks[:, :width].index_select(0, slots)

    def choice_rows(self, slots: Tensor, logits_rows: Tensor, positions: Tensor, flags: int) -> ChoiceRows:
        """The parameters of R rows. `slots` are at least `padded_rows(R)`: each parameter begins at whole 16 bytes."""
        num_rows = len(logits_rows)
        slots = slots[: padded_rows(num_rows)]
        seed, choice, top_p = self.words.index_select(1, slots)[:, :num_rows]
        temperature, min_p, top_k = self.halves.index_select(1, slots)[:, :num_rows]
        return ChoiceRows(
            logits_rows=logits_rows,
            temperature=temperature.view(torch.float32),
            top_k=top_k,
            top_p=top_p.view(torch.float64),
            min_p=min_p.view(torch.float32),
            seed=seed,
            choice=choice,
            position=positions,
            draws=bool(flags & DRAWS),
            limits_k=bool(flags & LIMITS_K),
            limits_p=bool(flags & LIMITS_P),
        )

    def forget(self) -> None:
        """Treat the tables as unknown: a step failed between building and applying its deltas."""
        self._held.clear()
        self._rows_step = -1
        self._free = list(range(self.spare))
        self._cells, self._cell_blocks, self._chosen = _new_deltas()

    def _take(self, choice: int, sampling: SamplingParams) -> _Held:
        if self._free:
            return self._held_by(self._free.pop(), choice, sampling, ())
        if self._rows_step == self._step:  # the rows of this step, which may not have been looked up one by one
            for row, held in zip(self._rows, self._held_rows, strict=True):
                held.step = self._step
                self._held[row.sequence_id] = self._held.pop(row.sequence_id)
        oldest = next(iter(self._held))
        if self._held[oldest].step == self._step:
            raise ValueError(f"a step has more sequences than the {self.spare} slots there are")
        return self._held_by(self._held.pop(oldest).slot, choice, sampling, ())

    def _held_by(self, slot: int, choice: int, sampling: SamplingParams, block_ids: tuple[int, ...]) -> _Held:
        """A slot's new parameters, which are sent with the next deltas."""
        drawn = draws(sampling)
        flags = 0
        if drawn:
            flags = DRAWS
            flags |= LIMITS_K if 0 < sampling.top_k < self._vocab_size else 0
            flags |= LIMITS_P if sampling.top_p < 1.0 else 0
        words = _signed(sampling.seed), _signed(choice), _bits("<d", "<q", sampling.top_p)
        halves = (
            _bits("<f", "<i", sampling.temperature if drawn else 0.0),
            _bits("<f", "<i", sampling.min_p),
            min(sampling.top_k, self._vocab_size),
        )
        self._chosen[slot] = slot, words, halves
        return _Held(slot=slot, step=self._step, choice=choice, sampling=sampling, flags=flags, block_ids=block_ids)


def padded_rows(num_rows: int) -> int:
    """How many rows are gathered for `num_rows`: those of four bytes fill whole 16."""
    return -(-num_rows // 4) * 4


_Parameters = tuple[int, tuple[int, int, int], tuple[int, int, int]]


def _new_deltas() -> tuple[array[int], array[int], dict[int, _Parameters]]:
    return array("q"), array("i"), {}


def _signed(number: int) -> int:
    """The int64 with the bits of a number modulo 2^64."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def _bits(written: str, read: str, number: float) -> int:
    (found,) = struct.unpack(read, struct.pack(written, number))
    return int(found)

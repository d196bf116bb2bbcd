"""One step on the device: from packed sections, padded to its graph's size, to hidden states, logits and chosen tokens.

The launches follow from the sections' lengths and from arguments alone, so a captured call can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quire_engine.execution.finishing import Ruled
from quire_engine.execution.gpu.device import HostBuffer, Packed, aligned
from quire_engine.execution.gpu.step_arrays import StepArrays, pad_slots
from quire_engine.execution.gpu.tables import ADAPTED, SlotTables
from quire_engine.execution.logit_rules import SampleRow, apply_rules
from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.served import ModelFacts
from quire_engine.execution.sampler import Chosen, Sampler
from quire_kernels.kernel_set import AttentionRows, ChoiceRows, StepAdapters
from quire_kernels.low_rank import Places

_ID, _FLAG = 8, 1  # bytes


class Model(Protocol):
    """The part of `models.decoder.Decoder` that a step uses."""

    @property
    def config(self) -> ModelFacts: ...
    @property
    def chains_decodes(self) -> bool: ...
    def forward(self, step: ModelInput, kv: Tensor) -> Tensor: ...
    def normed(self, hidden: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def choose(self, logits: Tensor, rows: ChoiceRows) -> tuple[Tensor, Tensor, Tensor]: ...


class Forward:
    """Issues a step's work and waits for nothing.

    Owns nothing: the model, the pool, the tables and the words that hold token ids are its caller's.
    """

    def __init__(  # noqa: PLR0917 - what its caller owns
        self,
        model: Model,
        kv: Tensor,
        tables: SlotTables,
        words: Tensor,
        block_size: int,
        places: Places | None = None,
    ) -> None:
        """`words` [n] int64: what `source` counts in. `places`: of adapters."""
        self._model, self._kv, self._tables, self._words = model, kv, tables, words
        self._block_size, self._places = block_size, places

    def hidden(
        self,
        packed: Packed,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        counts: Sequence[int],
        *,
        chained: bool = False,
        adapted: bool = False,
    ) -> Tensor:
        """[S, H] of the rows that are sampled, the last `counts[i]` of each sequence; writes every row's K and V.

        `kv_lens` may be more than the context lengths that were sent, never less. `chained`: decodes in fewer launches,
        where the model has them. `adapted`: rows may have adapters, whose places are among the sections.
        """
        longest = max(kv_lens)
        rows = AttentionRows(
            positions=packed["positions"],
            kv_slots=packed["kv_slots"],
            query_starts=packed["query_starts"],
            context_lens=packed["context_lens"],
            block_tables=self._tables.block_rows(packed["table_slots"], -(-longest // self._block_size)),
            query_lens=tuple(query_lens),
            kv_lens=tuple(kv_lens),
            max_query_len=max(query_lens),
            max_context_len=longest,
        )
        every = sum(counts) == sum(query_lens)
        step = ModelInput(
            positions=rows.positions,
            kv_slots=rows.kv_slots,
            query_starts=rows.query_starts,
            context_lens=rows.context_lens,
            block_tables=rows.block_tables,
            query_lens=rows.query_lens,
            kv_lens=rows.kv_lens,
            max_query_len=rows.max_query_len,
            max_context_len=rows.max_context_len,
            input_ids=self._words.index_select(0, packed["source"]),
            sample_rows=packed["sample_rows"],
            sampled=None if every else _sampled(rows, packed, counts),
            single_ops=not chained,
            adapters=StepAdapters(slots=packed["row_places"], adapters=(self._places,)) if adapted else None,
        )
        return self._model.forward(step, self._kv)

    def mixed(self, packed: Packed, num_rows: int, num_sequences: int, context: int, adapted: bool = False) -> Tensor:
        """[num_sequences, H]: `hidden` of any step of so many rows and sequences whose contexts are `context` at most.

        Launched for all that such a step may hold, of kernels that find on the device what is there.
        """
        query_lens = (num_rows, *(1,) * (num_sequences - 1))
        return self.hidden(packed, query_lens, (context,) * num_sequences, (1,) * num_sequences, adapted=adapted)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def choose(self, logits: Tensor, rows: ChoiceRows, into: Chosen) -> None:
        """The next tokens of `rows`."""
        for target, found in zip(into, self._model.choose(logits, rows), strict=True):
            target.copy_(found)

    def choose_ruled(self, ruled: Ruled, sampler: Sampler, logits: Tensor, rows: ChoiceRows, into: Chosen) -> None:
        """Choose again for the rows whose logits a request changes. Waits: what it changes is the host's to tell."""
        at = torch.tensor(ruled.places, device=logits.device)
        values, some = _rows_at(at, ruled.rows, logits, rows)
        sampler.change(values, ruled)
        chosen, _, any_left = self._model.choose(values, some)
        into.ids.index_copy_(0, at, chosen)
        into.possible.index_copy_(0, at, any_left)
        opening = ruled.opening()
        if opening is not None:
            values, some = _rows_at(torch.tensor(opening.places, device=logits.device), opening.rows, logits, rows)
            apply_rules(values, opening.rows)
            chosen, _, any_left = self._model.choose(values, some)
            opening.keep(chosen, any_left, (into.ids, into.possible))

    def decoded(
        self, packed: Packed, num_rows: int, context: int, *, chained: bool = False, adapted: bool = False
    ) -> Tensor:
        """The logits of such a step."""
        ones = (1,) * num_rows
        return self.logits(self.hidden(packed, ones, (context,) * num_rows, ones, chained=chained, adapted=adapted))

    def decode(
        self, packed: Packed, num_rows: int, context: int, flags: int, into: Region, *, chained: bool = False
    ) -> Tensor:
        """A step of `num_rows` decodes whose contexts are `context` at most: the logits, and a token of each row."""
        logits = self.decoded(packed, num_rows, context, chained=chained, adapted=bool(flags & ADAPTED))
        rows = self._tables.choice_rows(
            packed["choice_slots"], packed["choice_rows"], packed["choice_positions"], flags
        )
        self.choose(logits, rows, into.chosen(0, num_rows))
        return logits


def _rows_at(at: Tensor, asked: Sequence[SampleRow], logits: Tensor, rows: ChoiceRows) -> tuple[Tensor, ChoiceRows]:
    """The logits of some of `rows`, copied, and their parameters."""
    some = replace(
        rows,
        logits_rows=torch.arange(len(at), device=logits.device),
        temperature=rows.temperature.index_select(0, at),
        top_k=rows.top_k.index_select(0, at),
        top_p=rows.top_p.index_select(0, at),
        min_p=rows.min_p.index_select(0, at),
        seed=rows.seed.index_select(0, at),
        choice=torch.tensor([row.stream for row in asked], device=logits.device),
        position=rows.position.index_select(0, at),
    )
    return logits.index_select(0, rows.logits_rows.index_select(0, at)), some


def _sampled(rows: AttentionRows, packed: Packed, counts: Sequence[int]) -> AttentionRows:
    """The sample rows alone."""
    chosen = packed["sample_rows"]
    return AttentionRows(
        positions=rows.positions.index_select(0, chosen),
        kv_slots=rows.kv_slots.index_select(0, chosen),
        query_starts=packed["sampled_starts"],
        context_lens=rows.context_lens,
        block_tables=rows.block_tables,
        query_lens=tuple(counts),
        kv_lens=rows.kv_lens,
        max_query_len=max(counts),
        max_context_len=rows.max_context_len,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The outcome of one step's choices, up to n rows: on the device for the next step, then in a host buffer.

    A step that is computed twice, whole and then item by item, finds the ids of the step before unchanged.
    """

    first_word: int  # of `ids`, counted in the words of the device's buffer
    bytes: Tensor  # all of it, uint8
    ids: Tensor  # [n] int64; a token of the vocabulary whatever the flags are
    finite: Tensor  # [n] bool
    possible: Tensor  # [n] bool

    def chosen(self, first: int, num_rows: int) -> Chosen:
        """Some of the rows, to be written."""
        end = first + num_rows
        return Chosen(self.ids[first:end], self.finite[first:end], self.possible[first:end])


def region_bytes(max_rows: int) -> int:
    return aligned(max_rows * (_ID + 2 * _FLAG))


def region_at(buffer: Tensor, offset: int, max_rows: int) -> Region:
    """The region that begins at a byte of the device's buffer [n] uint8."""
    held = buffer[offset : offset + region_bytes(max_rows)]
    finite, possible, end = (max_rows * size for size in (_ID, _ID + _FLAG, _ID + 2 * _FLAG))
    return Region(
        first_word=offset // _ID,
        bytes=held,
        ids=held[:finite].view(torch.int64),
        finite=held[finite:possible].view(torch.bool),
        possible=held[possible:end].view(torch.bool),
    )


def read_region(buffer: HostBuffer, max_rows: int, first: int, num_rows: int) -> tuple[list[int], bytes, bytes]:
    """Ids and flags of some rows, from a copy of a region."""
    finite, possible = max_rows * _ID + first, max_rows * (_ID + _FLAG) + first
    return (
        buffer.bytes[first * _ID : (first + num_rows) * _ID].cast("q").tolist(),
        bytes(buffer.bytes[finite : finite + num_rows]),
        bytes(buffer.bytes[possible : possible + num_rows]),
    )


def pad_decodes(
    arrays: StepArrays, num_rows: int, tables: SlotTables, spare_slots: Sequence[int], first_word: int
) -> None:
    """Make a step of decodes as large as its graph: one of `num_rows`.

    The rows added are token 0 at position 0, written to `spare_slots` alone. They change no result.
    """
    step = arrays.step
    have, missing = step.num_rows, num_rows - step.num_rows
    _pad_rows(arrays, num_rows, spare_slots, first_word)
    arrays.table_slots.extend([tables.spare] * missing)
    step.query_starts.extend(range(have + 1, num_rows + 1))
    step.context_lens.extend([1] * missing)
    pad_slots(arrays, num_rows, tables.spare)
    step.choice_rows.extend(range(have, num_rows))
    step.sample_rows.extend(range(have, num_rows))
    arrays.choice_positions.extend([0] * missing)


def pad_mixed(  # noqa: PLR0917 - sizes, and what is added
    arrays: StepArrays,
    num_rows: int,
    num_sequences: int,
    tables: SlotTables,
    spare_slots: Sequence[int],
    first_word: int,
) -> None:
    """Make a step whose sequences are asked for their last rows at most one of `num_rows` and `num_sequences`.

    The rows added are no sequence's, the sequences added have no rows; of each sequence there is one sample row, those
    that were asked for first. What is chosen stays as it is.
    """
    step = arrays.step
    missing = num_sequences - len(arrays.table_slots)
    end, sampled = step.num_rows, len(step.sample_rows)
    _pad_rows(arrays, num_rows, spare_slots, first_word)
    arrays.table_slots.extend([tables.spare] * missing)
    step.query_starts.extend([end] * missing)
    step.context_lens.extend([1] * missing)
    step.sampled_starts.extend([sampled] * missing)
    step.sample_rows.extend([0] * (num_sequences - sampled))


def _pad_rows(arrays: StepArrays, num_rows: int, spare_slots: Sequence[int], first_word: int) -> None:
    """Token 0 at position 0."""
    step = arrays.step
    have, missing = step.num_rows, num_rows - step.num_rows
    arrays.num_padding_rows = missing
    step.ids.extend([0] * missing)
    arrays.source.extend(range(first_word + have, first_word + num_rows))
    step.positions.extend([0] * missing)
    step.kv_slots.extend(spare_slots[i % len(spare_slots)] for i in range(missing))
    if arrays.flags & ADAPTED:
        arrays.row_places.extend([-1] * missing)

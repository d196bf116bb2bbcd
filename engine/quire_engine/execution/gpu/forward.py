"""One step on the device: from packed sections to hidden states, logits and chosen tokens.

Promises: issues work and waits for nothing; what is launched follows from the sections' lengths and from host values
that are arguments, so that a captured call can be repeated. Must not know: copies, graphs, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from quire_engine.execution.gpu.outcome import Region
from quire_engine.execution.gpu.packed_input import Packed
from quire_engine.execution.gpu.tables import SlotTables
from quire_engine.execution.model_input import ModelInput, Rows
from quire_engine.execution.models.config import ModelConfig
from quire_kernels.kernel_set import ChoiceRows


class Model(Protocol):
    """The part of `models.decoder.Decoder` that a step uses."""

    @property
    def config(self) -> ModelConfig: ...
    def forward(self, step: ModelInput, kv: Tensor) -> Tensor: ...
    def normed(self, hidden: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def choose(self, logits: Tensor, rows: ChoiceRows) -> tuple[Tensor, Tensor, Tensor]: ...


class Forward:
    """Owns nothing: the model, the pool, the tables and the words that hold token ids are its caller's."""

    def __init__(self, model: Model, kv: Tensor, tables: SlotTables, words: Tensor, block_size: int) -> None:
        """`words` [n] int64: what `source` counts in."""
        self._model, self._kv, self._tables, self._words = model, kv, tables, words
        self._block_size = block_size

    def hidden(
        self, packed: Packed, query_lens: Sequence[int], kv_lens: Sequence[int], counts: Sequence[int]
    ) -> Tensor:
        """[S, H] of the rows that are sampled, the last `counts[i]` of each sequence; writes every row's K and V.

        `kv_lens` may be more than the context lengths that were sent, never less.
        """
        longest = max(kv_lens)
        rows = Rows(
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
        )
        return self._model.forward(step, self._kv)

    def mixed(self, packed: Packed, num_rows: int, num_sequences: int, context: int) -> Tensor:
        """[num_sequences, H]: `hidden` of any step of so many rows and sequences whose contexts are `context` at most.

        Launched for all that such a step may hold, of kernels that find on the device what is there.
        """
        query_lens = (num_rows, *(1,) * (num_sequences - 1))
        return self.hidden(packed, query_lens, (context,) * num_sequences, (1,) * num_sequences)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def choose(self, logits: Tensor, rows: ChoiceRows, into: Region, first: int) -> None:
        """The next tokens of `rows`, which become the region's rows from `first` on."""
        end = first + len(rows.logits_rows)
        ids, finite, possible = self._model.choose(logits, rows)
        into.ids[first:end].copy_(ids)
        into.finite[first:end].copy_(finite)
        into.possible[first:end].copy_(possible)

    def decode(self, packed: Packed, num_rows: int, context: int, flags: int, into: Region) -> Tensor:
        """A step of `num_rows` decodes whose contexts are `context` at most: the logits, and a token of each row."""
        ones = (1,) * num_rows
        logits = self.logits(self.hidden(packed, ones, (context,) * num_rows, ones))
        rows = self._tables.choice_rows(
            packed["choice_slots"], packed["choice_rows"], packed["choice_positions"], flags
        )
        self.choose(logits, rows, into, 0)
        return logits


def _sampled(rows: Rows, packed: Packed, counts: Sequence[int]) -> Rows:
    """The sample rows alone."""
    chosen = packed["sample_rows"]
    return Rows(
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

"""Gives one rank its own rows of each matrix, where ranks hold no more: on devices with memories of their own.

Promises: of queries, keys and values the rank's heads, of every other matrix `columns_of` its outputs. Must not know:
processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.expert_layers import SHARED
from quire_engine.execution.models.matrix_parts import Part, WeightSource, rows_of
from quire_engine.ranks import Rank
from quire_kernels.kernel_set import KernelSet, LinearWeight, expert_rows
from quire_kernels.ranks import columns_of


class RankSource:
    """See `WeightSource`: of another one that has whole matrices."""

    def __init__(self, source: WeightSource, config: ModelConfig, kernels: KernelSet, rank: Rank) -> None:
        if kernels.part_of is None:
            raise ValueError(f"the {kernels.name} kernels are not divided among ranks")
        self._source, self._config, self._rank = source, config, rank
        self._part_of = kernels.part_of

    def tensor(self, name: str, *, wide: bool = False) -> Tensor:
        return self._source.tensor(name, wide=wide)

    def matrix(self, place: str, weights: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        *_, layer, name = place.split(".")
        index, config = int(layer), self._config
        width, of_keys = config.kv_heads[index].width, config.kv_heads[index].values
        queries = config.num_heads * width
        if name == "qkv":
            # Stored one by one, or fused: in two parts where the heads of keys have an order of their own.
            sizes = {3: [queries, of_keys, of_keys], 2: [queries + of_keys, of_keys], 1: [queries + 2 * of_keys]}
            return self._some(place, weights, biases, sizes[len(weights)], self._own_heads(index))
        if name == "attention_gate":
            return self._some(place, weights, biases, [queries], self._own_heads(index)[:1])
        biases = self._cut(biases, config.hidden_size)
        return self._part_of(
            self._source.matrix(place, self._cut(weights, config.hidden_size), biases), config.hidden_size
        )

    def gate_up(self, place: str, gate: Sequence[Part], up: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        experts, inner = self._config.experts, self._config.intermediate_size
        if experts is not None and gate[0].filled:
            inner = experts.inner
        elif experts is not None and place.endswith(SHARED):
            inner = experts.shared_inner
        parts = [self._cut(each, inner) for each in (gate, up, biases)]
        return self._part_of(self._source.gate_up(place, *parts), 2 * inner)

    def _some(
        self, place: str, weights: Sequence[Part], biases: Sequence[Part], sizes: Sequence[int], own: Sequence[slice]
    ) -> LinearWeight:
        bias = rows_of(biases, sizes, own) if biases else []
        return self._part_of(self._source.matrix(place, rows_of(weights, sizes, own), bias), sum(sizes))

    def _cut(self, parts: Sequence[Part], count: int) -> list[Part]:
        """The rank's rows of each of several matrices of `count`, or of each expert's, which are filled up again."""
        own = self._own(count)
        filled = expert_rows(own.stop - own.start)
        return [
            replace(each, filled=filled if each.filled else 0)
            for part in parts
            for each in rows_of([part], [count], [own])
        ]

    def stored_table(self, place: str, name: str) -> LinearWeight | None:
        """None: every rank has the whole table as numbers, of which the head is a part where both are one."""
        del place, name
        return None

    def head(self, place: str, name: str, embedding: Tensor | None, rows: slice | None = None) -> LinearWeight:
        del rows  # a rank has its own
        count = self._config.vocab_size
        return self._part_of(self._source.head(place, name, embedding, self._own(count)), count)

    def _own(self, count: int) -> slice:
        return columns_of(self._rank.number, self._rank.size, count)

    def _own_heads(self, index: int) -> list[slice]:
        """Rows of a layer's queries, keys and values, one below the other."""
        heads = self._config.kv_heads[index]
        first, found = 0, list[slice]()
        for count in (self._config.num_heads, heads.number, heads.number):
            own = self._rank.heads(count)
            found.append(slice(first + own.start * heads.width, first + own.stop * heads.width))
            first += count * heads.width
        return found

"""Attention over the paged pool for the layers of a transformers model, by the kernels or by plain torch.

Where all layers have equal heads, the kernels' own pool and attention compute them: the model has rotated its keys
already, so the write op gets angles of zero. Other layers, with values of another width than keys or wider heads than
the kernels take, lie in a plain pool and are computed by `attend`, in the way of the reference: every product has one
shape, so a row's bits depend on its query and its sequence's keys and values alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_engine.contract.kv_groups import KVLayout
from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.fallback.facts import AttentionFacts, Facts
from quire_engine.execution.models.fallback.interface import AttentionCall
from quire_engine.ranks import ALONE, Rank
from quire_kernels.cpu.kv_layout import unsupported
from quire_kernels.kernel_set import AttentionRows, AttentionShape, KernelSet

_CHUNK = 128  # positions of one step of the softmax
_PRODUCT_ROWS = 8  # rows of one product: query rows times the heads that share a key head
_AT_ONCE = 8  # sequences of one tile that share their products
_LANES = 64  # see `facts`
PLAIN_HEAD_DIM = 64  # any width that every kernel set takes: their attention is not used with the plain pool


def uses_kernels(facts: Facts, block_size: int) -> bool:
    """Whether the kernels' own pool and attention compute the model's layers."""
    return facts.is_uniform and unsupported(head_dim=facts.head_dim, block_size=block_size) is None


def divides_heads(facts: Facts, block_size: int, size: int) -> bool:
    """Whether each of `size` ranks can compute its own heads of every layer, of whose keys and values it has a pool.

    Otherwise every rank computes all of them: those of a plain pool share products, whose shapes must stay.
    """
    divided = all(
        layer.num_heads % size == 0 and (layer.num_kv_heads % size == 0 or size % layer.num_kv_heads == 0)
        for layer in facts.attention
    )
    return divided and uses_kernels(facts, block_size)


def with_plain_pool(kernels: KernelSet, facts: Facts) -> KernelSet:
    """Return the kernels over the plain pool: one row of values a block, layer after layer, keys before values."""

    def values_of_block(layers: int, block_size: int) -> int:
        return PlainPool(facts.attention[:layers], block_size).num_values

    def new_kv(  # noqa: PLR0917 - the op's contract
        num_blocks: int,
        layers: int,
        heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        del heads, head_dim
        return torch.zeros(num_blocks, values_of_block(layers, block_size), dtype=dtype, device=device)

    def kv_block_bytes(layers: int, heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
        del heads, head_dim
        return values_of_block(layers, block_size) * dtype.itemsize

    return replace(kernels, new_kv=new_kv, kv_block_bytes=kv_block_bytes, copy_blocks=None)


class PlainPool:
    """The places of each layer's keys [heads, block, Dk] and values [heads, block, Dv] in a block's row of values.

    `layers`: all; or as many as a block has, where they are all of one size.
    """

    def __init__(self, layers: Sequence[AttentionFacts], block_size: int) -> None:
        self.block_size = block_size
        self._places: list[tuple[int, int, AttentionFacts]] = []
        at = 0
        for layer in layers:
            slots = layer.num_kv_heads * block_size
            self._places.append((at, at + slots * layer.key_dim, layer))
            at += slots * (layer.key_dim + layer.value_dim)
        self.num_values = at

    def views(self, kv: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer: [blocks, heads, block, D] each."""
        keys, values, facts = self._places[layer]
        shape = (facts.num_kv_heads, self.block_size)
        end = values + facts.num_kv_heads * self.block_size * facts.value_dim
        return (
            torch.unflatten(kv[:, keys:values], 1, (*shape, facts.key_dim)),
            torch.unflatten(kv[:, values:end], 1, (*shape, facts.value_dim)),
        )


@dataclass(frozen=True, slots=True)
class _Place:
    """A layer's group and its place in the group's blocks, its facts, and for the kernels the shape of own heads."""

    group: int
    index: int
    facts: AttentionFacts
    shape: AttentionShape | None


class PagedAttention:
    """The attention of one model's layers in a step."""

    def __init__(
        self, facts: Facts, kernels: KernelSet, block_size: int, positions: int, layout: KVLayout, *, rank: Rank = ALONE
    ) -> None:
        """`positions`: those of the longest sequence. `rank`: whose heads are computed here; `layout` is its own."""
        self._kernels, self._rank = kernels, rank
        self._by_kernels = uses_kernels(facts, block_size)
        self._pool = PlainPool(facts.attention[: layout.layers_per_block], block_size)
        self._still = torch.empty(0)
        if self._by_kernels:
            half = facts.head_dim // 2
            self._still = torch.cat([torch.ones(positions, half), torch.zeros(positions, half)], dim=1)
        self._places = {
            layer.name: _Place(place.group, place.layer, layer, _shape(layer, rank) if self._by_kernels else None)
            for layer, place in zip(facts.attention, layout.places, strict=True)
        }

    def compute(self, name: str, call: AttentionCall, step: ModelInput, kv: Tensor) -> Tensor:
        """[T, heads, Dv] of the step's T rows; rows of the call behind them are padding."""
        place = self._places[name]
        return self._compute(place, call, step.in_group(place.group), kv)

    def _compute(self, place: _Place, call: AttentionCall, step: AttentionRows, kv: Tensor) -> Tensor:
        rows = len(step.positions)
        query, key, value = (x[0, :, :rows].transpose(0, 1) for x in (call.query, call.key, call.value))  # [T, H, D]
        if place.shape is not None:
            shape = self._shape(place, call)
            if self._rank.size > 1:
                own, own_kv = (self._rank.heads(x.shape[1]) for x in (query, key))
                query, key, value = query[:, own], key[:, own_kv], value[:, own_kv]
            qkv = torch.cat([query, key, value], dim=1).reshape(rows, -1)
            q = self._kernels.rope_write(qkv, self._still, shape, kv, place.index, step)
            mixed = self._kernels.attention(q, shape, kv, place.index, step)
            if self._rank.size > 1 and self._kernels.join_columns is not None:
                mixed = self._kernels.join_columns(mixed)
            return mixed.view(rows, -1, shape.head_dim)
        return self._plainly(place, call, step, kv, (query, key, value))

    def _shape(self, place: _Place, call: AttentionCall) -> AttentionShape:
        """The layer's shape for the kernels; its sinks are weights, which the first step shows."""
        if call.sinks is None or place.shape is None or place.shape.sinks is not None:
            return cast(AttentionShape, place.shape)
        own = self._rank.heads(len(call.sinks))
        shape = replace(place.shape, sinks=call.sinks.detach().float()[own].contiguous())
        self._places[place.facts.name] = replace(place, shape=shape)
        return shape

    def _plainly(
        self, place: _Place, call: AttentionCall, step: AttentionRows, kv: Tensor, rows: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        size, (query, key, value) = self._pool.block_size, rows
        keys, values = self._pool.views(kv, place.index)
        blocks, offsets = step.kv_slots // size, step.kv_slots % size
        keys[blocks, :, offsets] = key.to(kv.dtype)
        values[blocks, :, offsets] = value.to(kv.dtype)
        out = query.new_empty(len(query), place.facts.num_heads, place.facts.value_dim)
        tile, first, short = tile_rows(place.facts), 0, []
        for sequence, (count, length) in enumerate(zip(step.query_lens, step.kv_lens, strict=True)):
            if count > tile:
                rows_of = (
                    torch.arange(first, first + -(-count // tile) * tile).clamp_(max=first + count - 1).view(-1, tile)
                )
                pool = SequencePool(keys, values, step.block_tables[sequence : sequence + 1], [length], size)
                out[rows_of] = attend(query[rows_of], step.positions[rows_of], pool, place.facts, call.sinks).to(
                    out.dtype
                )
            elif count:
                short.append((length, sequence, [first + min(row, count - 1) for row in range(tile)]))
            first += count
        # Sequences of one tile share their products, the longest first.
        short.sort(reverse=True)
        for start in range(0, len(short), _AT_ONCE):
            lengths, sequences, tiles = zip(*short[start : start + _AT_ONCE], strict=True)
            rows_of = torch.tensor(tiles)
            pool = SequencePool(keys, values, step.block_tables[list(sequences)], list(lengths), size)
            out[rows_of] = attend(query[rows_of], step.positions[rows_of], pool, place.facts, call.sinks).to(out.dtype)
        return out


def _shape(layer: AttentionFacts, rank: Rank) -> AttentionShape:
    return AttentionShape(
        num_heads=layer.num_heads // rank.size,
        num_kv_heads=max(1, layer.num_kv_heads // rank.size),
        head_dim=layer.key_dim,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
    )


class SequencePool:
    """One layer's keys and values of some sequences, the longest first."""

    def __init__(self, keys: Tensor, values: Tensor, tables: Tensor, lengths: list[int], size: int) -> None:
        """`keys`, `values` [blocks, heads, size, D]; `tables` [n, blocks]."""
        self.lengths = lengths
        self.chunk = max(_CHUNK, size)
        self._keys, self._values, self._size = keys, values, size
        self._tables = F.pad(tables.long(), (0, -tables.shape[1] % (self.chunk // size)))

    def read(self, start: int, oldest: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A chunk of those that are longer than `start`: float32 [n, heads, chunk, D] each.

        Zeros past an end, and before the `oldest` position that some row of a sequence sees: there may be no block.
        """
        active = sum(length > start for length in self.lengths)
        tables = self._tables[:active, start // self._size : (start + self.chunk) // self._size]
        positions = torch.arange(start, start + self.chunk)
        past = positions >= torch.tensor(self.lengths[:active])[:, None]
        if max(oldest) > start:
            past |= positions < torch.tensor(oldest[:active])[:, None]
        found = []
        for held in (self._keys, self._values):
            blocks = held[tables].transpose(1, 2).flatten(2, 3).float()  # [n, heads, chunk, D]
            found.append(blocks.masked_fill_(past[:, None, :, None], 0.0) if bool(past.any()) else blocks)
        return found[0], found[1]


def tile_rows(layer: AttentionFacts) -> int:
    """The number of rows that are computed together."""
    return max(1, _PRODUCT_ROWS // (layer.num_heads // layer.num_kv_heads))


def attend(query: Tensor, positions: Tensor, pool: SequencePool, layer: AttentionFacts, sinks: Tensor | None) -> Tensor:
    """Tiles of rows, query [n, tile, Hq, Dk] at `positions` [n, tile]: float32 [n, tile, Hq, Dv].

    The tiles are all of one sequence, or each of its own. Keys are read in chunks at fixed positions, with one online
    softmax.
    """
    tiles, tile, heads = len(query), query.shape[1], layer.num_kv_heads
    group, chunk = layer.num_heads // heads, pool.chunk
    queries = (query.float() * layer.scale).view(tiles, tile, heads, group, -1)
    queries = queries.permute(2, 0, 1, 3, 4).reshape(heads, tiles, tile * group, -1)
    peak = queries.new_full((heads, tiles, tile * group, 1), -math.inf)
    total, result = torch.zeros_like(peak), queries.new_zeros(heads, tiles, tile * group, layer.value_dim)
    oldest = [0] * len(pool.lengths)
    if layer.window is not None:
        first = positions.view(len(oldest), -1).amin(dim=1)  # of each sequence
        oldest = (first - layer.window + 1).clamp_(min=0).tolist()
    for start in range(min(oldest) // chunk * chunk, pool.lengths[0], chunk):
        keys, values = pool.read(start, oldest)
        active = tiles if len(pool.lengths) == 1 else len(keys)
        scores = _products(queries[:, :active], keys.transpose(2, 3))  # [Hkv, n, tile * G, C]
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        distance = positions[:active, :, None] - torch.arange(start, start + chunk)
        hidden = distance < 0
        if layer.window is not None:
            hidden |= distance >= layer.window
        by_row = scores.view(heads, active, tile, group, chunk)
        scores = by_row.masked_fill(hidden[:, :, None], -math.inf).view_as(scores)
        before = peak[:, :active]
        higher = torch.maximum(before, scores.amax(dim=-1, keepdim=True))
        base = higher.masked_fill(higher == -math.inf, 0.0)  # no position is visible yet: weights are exactly 0
        weights, fade = torch.exp(scores - base), _exp(before - base)
        total[:, :active] = total[:, :active] * fade + weights.sum(dim=-1, keepdim=True)
        result[:, :active] = result[:, :active] * fade + _products(weights, values)
        peak[:, :active] = higher
    if sinks is not None:
        sink = sinks.float().view(heads, 1, 1, group, 1).expand(heads, tiles, tile, group, 1).reshape(peak.shape)
        higher = torch.maximum(peak, sink)
        fade = _exp(peak - higher)
        total, result = total * fade + _exp(sink - higher), result * fade
    found = (result / total).view(heads, tiles, tile, group, -1).permute(1, 2, 0, 3, 4)
    return found.reshape(tiles, tile, layer.num_heads, -1)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """left [H, n, M, K] times right [n, H, K, N], or [1, H, K, N] for all n: [H, n, M, N] by products of one shape."""
    heads, tiles = left.shape[:2]
    if len(right) == 1 and tiles > 1:
        each = [torch.bmm(left[head], right[0, head].expand(tiles, -1, -1)) for head in range(heads)]
        return torch.stack(each)
    both = torch.bmm(left.flatten(0, 1), right.transpose(0, 1).flatten(0, 1))
    return both.view(heads, tiles, *both.shape[1:])


def _exp(x: Tensor) -> Tensor:
    """exp by the vector form alone, whatever the number of values."""
    flat = x.flatten()
    padded = F.pad(flat, (0, -len(flat) % _LANES))
    return torch.exp(padded)[: len(flat)].view_as(x)

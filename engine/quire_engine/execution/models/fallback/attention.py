"""Attention over the paged pool for the layers of a transformers model, by the kernels or by plain torch.

Where all layers have equal heads, the kernels' own pool and attention compute them: the model has rotated its keys
already, so the write op gets angles of zero. Other layers, with softcaps, sinks, values of another width than keys or
wider heads than the kernels take, lie in a plain pool and are computed by `attend`, in the way of the reference: every
product has one shape, so a row's bits depend on its query and its sequence's keys and values alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.fallback.facts import AttentionFacts, Facts
from quire_engine.execution.models.fallback.interface import AttentionCall
from quire_kernels.cpu.kv_layout import unsupported
from quire_kernels.kernel_set import AttentionShape, KernelSet

_CHUNK = 128  # positions of one step of the softmax
_PRODUCT_ROWS = 8  # rows of one product: query rows times the heads that share a key head
_LANES = 64  # see `facts`
PLAIN_HEAD_DIM = 64  # any width that every kernel set takes: their attention is not used with the plain pool


def uses_kernels(facts: Facts, block_size: int) -> bool:
    """Whether the kernels' own pool and attention compute the model's layers."""
    return facts.is_uniform and unsupported(head_dim=facts.head_dim, block_size=block_size) is None


def with_plain_pool(kernels: KernelSet, facts: Facts) -> KernelSet:
    """The same kernels over the plain pool: one row of values a block, layer after layer, keys before values."""

    def values_of_block(block_size: int) -> int:
        return PlainPool(facts.attention, block_size).num_values

    def new_kv(  # noqa: PLR0917 - the op's contract
        num_blocks: int,
        layers: int,
        heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        del layers, heads, head_dim
        return torch.zeros(num_blocks, values_of_block(block_size), dtype=dtype, device=device)

    def kv_block_bytes(layers: int, heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
        del layers, heads, head_dim
        return values_of_block(block_size) * dtype.itemsize

    return replace(kernels, new_kv=new_kv, kv_block_bytes=kv_block_bytes, copy_blocks=None)


class PlainPool:
    """Where each layer's keys [heads, block, Dk] and values [heads, block, Dv] lie in a block's row of values."""

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
    """A layer's index in the pool, its facts, and its shape for the kernels."""

    index: int
    facts: AttentionFacts
    shape: AttentionShape | None


class PagedAttention:
    """The attention of one model's layers in a step."""

    def __init__(self, facts: Facts, kernels: KernelSet, block_size: int, positions: int) -> None:
        """`positions`: those of the longest sequence."""
        self._kernels = kernels
        self._by_kernels = uses_kernels(facts, block_size)
        self._pool = PlainPool(facts.attention, block_size)
        self._still = torch.empty(0)
        if self._by_kernels:
            half = facts.head_dim // 2
            self._still = torch.cat([torch.ones(positions, half), torch.zeros(positions, half)], dim=1)
        self._places = {
            layer.name: _Place(index, layer, _shape(layer) if self._by_kernels else None)
            for index, layer in enumerate(facts.attention)
        }

    def compute(self, name: str, call: AttentionCall, step: ModelInput, kv: Tensor) -> Tensor:
        """[T, heads, Dv] of the step's T rows; rows of the call behind them are padding."""
        place, rows = self._places[name], len(step.positions)
        query, key, value = (x[0, :, :rows].transpose(0, 1) for x in (call.query, call.key, call.value))  # [T, H, D]
        if place.shape is not None:
            qkv = torch.cat([query, key, value], dim=1).reshape(rows, -1)
            q = self._kernels.rope_write(qkv, self._still, place.shape, kv, place.index, step)
            return self._kernels.attention(q, place.shape, kv, place.index, step).view_as(query)
        return self._plainly(place, call, step, kv, (query, key, value))

    def _plainly(
        self, place: _Place, call: AttentionCall, step: ModelInput, kv: Tensor, rows: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        size, (query, key, value) = self._pool.block_size, rows
        keys, values = self._pool.views(kv, place.index)
        blocks, offsets = step.kv_slots // size, step.kv_slots % size
        keys[blocks, :, offsets] = key.to(kv.dtype)
        values[blocks, :, offsets] = value.to(kv.dtype)
        out = query.new_empty(len(query), place.facts.num_heads, place.facts.value_dim)
        first = 0
        for sequence, (count, length) in enumerate(zip(step.query_lens, step.kv_lens, strict=True)):
            if count == 0:
                continue
            table = step.block_tables[sequence, : -(-length // size)].long()
            read = partial(_read, keys, values, table, size)
            part = slice(first, first + count)
            out[part] = attend(query[part], read, length, place.facts, call.sinks).to(out.dtype)
            first += count
        return out


def _shape(layer: AttentionFacts) -> AttentionShape:
    return AttentionShape(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.key_dim,
        scale=layer.scale,
        window=layer.window,
    )


def _read(  # noqa: PLR0917 - a layer's pool, a sequence's blocks, and a range
    keys: Tensor, values: Tensor, table: Tensor, size: int, start: int, end: int
) -> tuple[Tensor, Tensor]:
    """Positions start .. end - 1 of a sequence, float32 [Hkv, n, D] each."""
    blocks = table[start // size : -(-end // size)]
    part = slice(start % size, start % size + end - start)
    held, weighed = (x[blocks].transpose(0, 1).flatten(1, 2)[:, part].float() for x in (keys, values))
    return held, weighed


Read = Callable[[int, int], tuple[Tensor, Tensor]]  # positions start .. end - 1: float32 [Hkv, n, D] each


def attend(query: Tensor, read: Read, length: int, layer: AttentionFacts, sinks: Tensor | None) -> Tensor:
    """The last rows of a sequence of `length` tokens, query [n, Hq, Dk]: float32 [n, Hq, Dv].

    Rows are computed in tiles of a fixed number, keys in chunks at fixed positions, with one online softmax.
    """
    count, heads, group = len(query), layer.num_kv_heads, layer.num_heads // layer.num_kv_heads
    tile = max(1, _PRODUCT_ROWS // group)
    tiles = -(-count // tile)
    rows = torch.arange(tiles * tile).clamp_(max=count - 1)  # the last tile repeats its last row
    positions = (rows + length - count).view(tiles, 1, tile, 1, 1)
    queries = query[rows].float() * layer.scale
    queries = queries.view(tiles, tile, heads, group, -1).transpose(1, 2).reshape(tiles * heads, tile * group, -1)
    peak = queries.new_full((tiles, heads, tile * group, 1), -math.inf)
    total = torch.zeros_like(peak)
    result = queries.new_zeros(tiles * heads, tile * group, layer.value_dim)
    oldest = 0 if layer.window is None else max(0, length - count - layer.window + 1)
    for start in range(oldest // _CHUNK * _CHUNK, length, _CHUNK):
        end = min(start + _CHUNK, length)
        keys, values = (F.pad(x, (0, 0, 0, _CHUNK - (end - start))) for x in read(start, end))
        scores = torch.bmm(queries, keys.transpose(1, 2).repeat(tiles, 1, 1))  # [tiles * Hkv, M, C]
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        at = torch.arange(start, start + _CHUNK)
        hidden = at > positions
        if layer.window is not None:
            hidden |= at <= positions - layer.window
        scores = scores.view(tiles, heads, tile, group, _CHUNK).masked_fill(hidden, -math.inf)
        scores = scores.view(tiles, heads, tile * group, _CHUNK)
        higher = torch.maximum(peak, scores.amax(dim=-1, keepdim=True))
        base = higher.masked_fill(higher == -math.inf, 0.0)  # no position is visible yet: weights are exactly 0
        weights, fade = torch.exp(scores - base), _exp(peak - base)
        total = total * fade + weights.sum(dim=-1, keepdim=True)
        seen = torch.bmm(weights.flatten(0, 1), values.repeat(tiles, 1, 1))
        result = result * fade.flatten(0, 1) + seen
        peak = higher
    if sinks is not None:
        sink = sinks.float().view(1, heads, 1, group, 1).expand(tiles, heads, tile, group, 1).reshape(peak.shape)
        higher = torch.maximum(peak, sink)
        fade = _exp(peak - higher)
        total, result = total * fade + _exp(sink - higher), result * fade.flatten(0, 1)
    found = (result / total.flatten(0, 1)).view(tiles, heads, tile, group, -1).transpose(1, 2)
    return found.reshape(tiles * tile, layer.num_heads, -1)[:count]


def _exp(x: Tensor) -> Tensor:
    """exp by the vector form alone, whatever the number of values."""
    flat = x.flatten()
    padded = F.pad(flat, (0, -len(flat) % _LANES))
    return torch.exp(padded)[: len(flat)].view_as(x)

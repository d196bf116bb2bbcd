"""Attention over the paged pool, causal or in both directions.

Promises: bitwise, a row's result depends on its query and its sequence's keys and values only, never on the slice it
was computed in, its neighbours, or what unused slots hold.

Every query row belongs to a tile of a fixed number of rows, and every tile walks its sequence in fixed chunks of
positions with one online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) in float32. Every matrix product thus
has one shape, so one order of summation; which rows share a tile, how many tiles share a call and whether a chunk lies
wholly behind a mask (an exact no-op) has no influence. Sequences that fit one tile, decoding ones above all, share
their calls; a longer slice is computed on its own, so that its tiles share the keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels.kernel_set import AttentionInput, AttentionShape
from quire_kernels.reference.paged_kv import read_kv

_CHUNK = 128  # positions per softmax step; whole blocks, so more with larger blocks and less where 128 is no multiple
_GROUP_BYTES = 4 << 20  # of keys and values read together: larger buffers cost more in page faults than they save
_PRODUCT_ROWS = 8  # rows of one matrix product: query rows of a tile times the heads that share a key head


class _Slice(NamedTuple):
    """The query rows of one sequence in this step."""

    sequence: int
    first_row: int
    num_rows: int
    kv_len: int

    @property
    def position(self) -> int:
        return self.kv_len - self.num_rows


def attention(q: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput) -> Tensor:
    threads = torch.get_num_threads()
    if q.device.type != "cpu" or threads == 1:
        return _attend(q, shape, kv, layer, step)
    # A single product in a call is split over threads in another way than one of several, and sums differently.
    torch.set_num_threads(1)
    try:
        return _attend(q, shape, kv, layer, step)
    finally:
        torch.set_num_threads(threads)


def _attend(q: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput) -> Tensor:
    tile = max(1, _PRODUCT_ROWS // (shape.num_heads // shape.num_kv_heads))
    out = torch.empty_like(q)  # [T, Hq, D]
    walk = _Walk(q=q, out=out, shape=shape, kv=kv, layer=layer, step=step, tile=tile)
    short = []
    first_row = 0
    for sequence, (num_rows, kv_len) in enumerate(zip(step.query_lens, step.kv_lens, strict=True)):
        rows = _Slice(sequence, first_row, num_rows, kv_len)
        first_row += num_rows
        if num_rows > tile:
            walk.one_long(rows)
        elif num_rows:
            short.append(rows)
    # Longest first, so that slices of like length share their calls.
    short.sort(key=lambda rows: -rows.kv_len)
    for start in range(0, len(short), walk.group):
        walk.some_short(short[start : start + walk.group])
    return out.flatten(1)


class _Softmax:
    """The running state of an online softmax for rows of shape [..., R]: peak, total and weighted values."""

    def __init__(self, queries: Tensor) -> None:
        self.peak = queries.new_full((*queries.shape[:-1], 1), -math.inf)
        self.total = torch.zeros_like(self.peak)
        self.values = torch.zeros_like(queries)  # [..., R, D]

    def narrow(self, dim: int, start: int, end: int) -> _Softmax:
        """Return the state restricted to a range of one dimension."""
        part = object.__new__(_Softmax)
        part.peak = self.peak.narrow(dim, start, end - start)
        part.total = self.total.narrow(dim, start, end - start)
        part.values = self.values.narrow(dim, start, end - start)
        return part

    def weigh(self, scores: Tensor) -> Tensor:
        """Turn a chunk's scores [..., R, C] (-inf: not visible) into weights, in place; rescale the earlier sums."""
        peak = torch.maximum(self.peak, scores.amax(dim=-1, keepdim=True))
        # A row without visible positions so far has no peak: any finite number keeps its weights at exactly 0.
        base = peak.masked_fill(peak == -math.inf, 0.0)
        fade = torch.exp(self.peak - base)
        weights = scores.sub_(base).exp_()
        self.total.mul_(fade).add_(weights.sum(dim=-1, keepdim=True))
        self.values.mul_(fade)
        self.peak.copy_(peak)
        return weights

    def result(self, sinks: Tensor | None) -> Tensor:
        """The values' mean. `sinks`: a score for each row, whose value is zero."""
        if sinks is None:
            return self.values / self.total
        peak = torch.maximum(self.peak, sinks)
        fade = torch.exp(self.peak - peak)
        return self.values * fade / (self.total * fade + torch.exp(sinks - peak))


class _Walk:
    """One layer's attention in one step."""

    def __init__(
        self,
        *,
        q: Tensor,
        out: Tensor,
        shape: AttentionShape,
        kv: Tensor,
        layer: int,
        step: AttentionInput,
        tile: int,
    ) -> None:
        self._q, self._out, self._shape, self._tile = q, out, shape, tile
        self._kv, self._layer, self._step = kv, layer, step
        block_size = kv.shape[4]
        self._chunk_blocks = max(1, _CHUNK // block_size)
        self._chunk = self._chunk_blocks * block_size
        self.group = max(1, _GROUP_BYTES // (2 * 4 * shape.num_kv_heads * self._chunk * shape.head_dim))  # short slices
        # Whole chunks of table: positions past a sequence's end are masked, whatever block 0 holds.
        missing = -step.block_tables.shape[1] % self._chunk_blocks
        self._tables = F.pad(step.block_tables, (0, missing))
        self._offsets = torch.arange(self._chunk, device=q.device)

    def some_short(self, slices: list[_Slice]) -> None:
        """Slices of one tile each, longest first, so that each chunk is for the first few."""
        device, heads = self._q.device, self._shape.num_kv_heads
        # A tile that is not full repeats its last row; the copies compute the same result again.
        rows = torch.tensor(
            [[s.first_row + min(i, s.num_rows - 1) for i in range(self._tile)] for s in slices], device=device
        )
        queries = self._queries(rows).permute(0, 2, 1, 3, 4).reshape(len(slices), heads, -1, self._shape.head_dim)
        positions = self._step.positions[rows]  # [n, tile]
        lengths = torch.tensor([s.kv_len for s in slices], device=device)
        tables = self._tables[torch.tensor([s.sequence for s in slices], device=device)]
        state = _Softmax(queries)  # [n, Hkv, R]
        earliest = min(s.position for s in slices)
        for start in range(self._first_chunk(earliest), slices[0].kv_len, self._chunk):
            n = sum(s.kv_len > start for s in slices)
            keys, values = self._read(tables[:n], start, slices[:n])  # [n, Hkv, C, D]
            scores = torch.bmm(queries[:n].flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
            scores = self._capped(scores.view(n, heads, -1, self._chunk))
            visible = self._visible(positions[:n], start, earliest, lengths[:n])
            if visible is not None:  # [n, tile, C] for all heads
                self._by_row(scores).masked_fill_(~visible[:, None, :, None], -math.inf)
            part = state.narrow(0, 0, n)
            weights = part.weigh(scores)
            part.values.add_(torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view_as(part.values))
        result = self._by_row(state.result(self._sinks())).permute(0, 2, 1, 3, 4)  # [n, tile, Hkv, G, D]
        self._out[rows] = result.flatten(2, 3).to(self._out.dtype)

    def one_long(self, s: _Slice) -> None:
        """A slice of several tiles, which share each chunk's keys. A chunk is for the tiles that can see it."""
        tile, heads = self._tile, self._shape.num_kv_heads
        num_tiles = -(-s.num_rows // tile)
        rows = torch.arange(num_tiles * tile, device=self._q.device).clamp_(max=s.num_rows - 1) + s.first_row
        rows = rows.view(num_tiles, tile)
        queries = self._queries(rows).permute(2, 0, 1, 3, 4).reshape(heads, num_tiles, -1, self._shape.head_dim)
        positions = self._step.positions[rows]  # [tiles, tile]
        tables = self._tables[s.sequence : s.sequence + 1]
        state = _Softmax(queries)  # [Hkv, tiles, R]
        length, ahead = torch.tensor([s.kv_len], device=self._q.device), self._most_ahead(s.kv_len)
        for start in range(self._first_chunk(s.position), s.kv_len, self._chunk):
            low, high = max(0, (start - ahead - s.position) // tile), num_tiles
            if self._shape.window is not None:
                high = min(high, -(-(start + self._chunk + self._shape.window - 1 - s.position) // tile))
            keys, values = self._read(tables, start, [s])  # [1, Hkv, C, D]
            keys, values = keys[0].transpose(1, 2), values[0]
            seeing = queries[:, low:high]
            scores = seeing.new_empty(*seeing.shape[:-1], self._chunk)
            for head in range(heads):
                torch.bmm(seeing[head], keys[head].expand(high - low, -1, -1), out=scores[head])
            scores = self._capped(scores)
            visible = self._visible(positions[low:high], start, s.position + low * tile, length)
            if visible is not None:
                self._by_row(scores).masked_fill_(~visible[None, :, :, None], -math.inf)
            part = state.narrow(1, low, high)
            weights = part.weigh(scores)
            for head in range(heads):
                part.values[head] += torch.bmm(weights[head], values[head].expand(high - low, -1, -1))
        sinks = self._sinks()
        found = state.result(None if sinks is None else sinks[:, None])
        result = self._by_row(found).permute(1, 2, 0, 3, 4)  # [tiles, tile, Hkv, G, D]
        self._out[rows] = result.flatten(2, 3).to(self._out.dtype)

    def _queries(self, rows: Tensor) -> Tensor:
        """Scaled float32 queries of [n, tile] rows: [n, tile, Hkv, G, D]."""
        found = self._q[rows].float() * self._shape.scale
        return found.view(*rows.shape, self._shape.num_kv_heads, -1, self._shape.head_dim)

    def _capped(self, scores: Tensor) -> Tensor:
        """The scores under the layer's cap: tanh x = 1 - 2 / (1 + e^2x)."""
        cap = self._shape.softcap
        if cap is None:
            return scores
        return scores.mul_(2 / cap).exp_().add_(1).reciprocal_().mul_(-2 * cap).add_(cap)

    def _sinks(self) -> Tensor | None:
        """Each row's sink: [Hkv, tile * G, 1]."""
        sinks, heads = self._shape.sinks, self._shape.num_kv_heads
        if sinks is None:
            return None
        by_head = sinks.to(self._q.device, torch.float32).view(heads, 1, -1)
        return by_head.expand(-1, self._tile, -1).reshape(heads, -1, 1)

    def _by_row(self, x: Tensor) -> Tensor:
        """View [a, b, tile * G, X] as [a, b, tile, G, X]."""
        return x.view(*x.shape[:2], self._tile, -1, x.shape[-1])

    def _first_chunk(self, position: int) -> int:
        """The first chunk for rows from `position` on; chunk borders are counted from position 0."""
        if self._shape.window is None:
            return 0
        return max(0, position - self._shape.window + 1) // self._chunk * self._chunk

    def _most_ahead(self, kv_len: int) -> int:
        """How many positions behind its own a row sees at most."""
        if not self._shape.bidirectional:
            return 0
        return kv_len if self._shape.window is None else self._shape.window - 1

    def _visible(self, positions: Tensor, start: int, least: int, lengths: Tensor) -> Tensor | None:
        """The chunk's positions that each row [n, tile] sees: [n, tile, C], or None for all of them.

        `least`: no row is before it. `lengths`: [n] of the rows' sequences, or [1].
        """
        window = self._shape.window
        if window is None and start + self._chunk <= least + 1:
            return None
        keys = self._offsets + start
        distance = positions.unsqueeze(-1) - keys
        if self._shape.bidirectional:
            seen, distance = keys < lengths.view(-1, 1, 1), distance.abs()
        else:
            seen = distance >= 0
        return seen if window is None else seen & (distance < window)

    def _read(self, tables: Tensor, start: int, slices: list[_Slice]) -> tuple[Tensor, Tensor]:
        """The chunk's keys and values. Values that no row sees are zeroed: 0 times stale NaN is not 0.

        They lie past a sequence's end, or before its rows' windows, where there may be no block any more.
        """
        first = start // self._chunk * self._chunk_blocks
        keys, values = read_kv(self._kv, self._layer, tables[:, first : first + self._chunk_blocks])
        for i, s in enumerate(slices):
            if s.kv_len < start + self._chunk:
                values[i, :, s.kv_len - start :].zero_()
            if self._shape.window is not None and (seen := s.position - self._shape.window + 1) > start:
                values[i, :, : seen - start].zero_()
        return keys, values

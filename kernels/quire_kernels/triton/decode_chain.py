"""The layers of a step of decodes in five launches each, every one of which begins while the one before it computes.

Promises: a row's bits do not depend on the other rows of the step; for one model the launches follow from the number of
rows and from the longest context that is planned. Must not know: models, the engine.

The launches of a layer (`chain_product` tells what a launch does before the one before it has ended):

1. the norm, the projections of Q, K and V, the norms of heads, RoPE, the write to the pool;
2. attention;
3. the projection of what attention gives, and the residual, with the sums of squares for the next norm;
4. the norm, gate and up, the activation;
5. down and the residual, with the sums of squares for the next layer's norm.

Where keys are several parts they are joined by the programs of launch 2, where rows keep the multiprocessors busy; or
by those of launch 3, where rows and parts are few; or else by a launch of their own, the sixth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire_kernels.kernel_set import (
    Attend,
    AttentionInput,
    AttentionShape,
    BoundDecodes,
    KeepSampled,
    LayerOp,
    LinearAdd,
    Norm,
    NormGateUp,
    NormLinear,
    RopeWrite,
    StepInput,
)
from quire_kernels.reference.linear import Linear
from quire_kernels.triton.attention import TritonAttention
from quire_kernels.triton.chain_product import (
    chained_add,
    chained_gate_up,
    chained_join_add,
    chained_qkv,
    square_sums,
)
from quire_kernels.triton.decode_attention import (
    DecodeParts,
    launch_ahead,
    launch_join,
    launch_parts,
    new_parts,
    num_parts,
    parts_together,
)
from quire_kernels.triton.pool import PoolSizes
from quire_kernels.triton.softmax import SPLIT

MOST_ROWS = 64  # with more, libraries' products compute faster than weights are read
_FEW_ROWS, _MANY_ROWS = 16, 32  # of a tile
_MOST_NARROW = 4096  # columns of a result that is computed in tiles of 16, not 32, so that all multiprocessors are busy
_MOST_JOINED_LATE = 32  # parts of all rows that launch 3 joins: each of its programs reads all of them
_MOST_LATE_ROWS = 4
_LATE_WEIGHTS = 32768  # of a program of launch 3 that joins: 64 KiB, in registers
_LEAST_COLUMNS = 4  # of a tile of columns
_LEAST_BUSY, _MOST_JOINED_EARLY = 64, 16  # programs of launch 2 that join parts themselves, and the parts of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer of the only form that is served."""

    qkv: NormLinear
    rope: RopeWrite
    attend: Attend
    out: LinearAdd
    gate_up: NormGateUp
    down: LinearAdd


class _Room(NamedTuple):
    """The memory by which launches pass on their results, the same in every layer."""

    q: Tensor  # [T, Hq, D]
    mixed: Tensor  # [T, Hq, D]
    wide: Tensor  # [T, I]
    squares: Tensor  # [tiles of the hidden size, T] float32
    parts: DecodeParts


class DecodeChain:
    """The launches of one model's layers. `ahead`: the GPU has programmatic dependent launch."""

    def __init__(self, attention: TritonAttention, layers: Sequence[_Layer], *, ahead: bool) -> None:
        self._attention, self._layers, self._ahead = attention, layers, ahead
        self._launch = {"AHEAD": ahead, "num_warps": 4, **launch_ahead(ahead)}

    def __call__(self, x: Tensor, kv: Sequence[Tensor], step: StepInput) -> Tensor | None:
        """See `BoundDecodes`."""
        num_rows = len(x)
        if not 0 < num_rows <= MOST_ROWS or step.max_query_len > 1 or step.sampled is not None or not x.is_contiguous():
            return None
        pools = [
            self._attention.sizes_of(each.rope.shape, kv[each.rope.part], each.rope.layer, x.dtype)
            for each in self._layers
        ]
        if len(step.query_lens) != num_rows or any(sizes is None for sizes in pools):
            return None
        room = self._room(x, step)
        square_sums[num_rows,](
            x, room.squares, x.shape[1], WIDTH=triton.next_power_of_2(x.shape[1]), **self._launch
        )  # fmt: skip
        num_squares = 1
        for each, sizes in zip(self._layers, pools, strict=True):
            assert sizes is not None
            rows = step.in_group(each.rope.group)
            self._qkv(x, each, kv[each.rope.part], sizes, rows, room, num_squares)
            num_squares = self._attend(x, each, kv[each.attend.part], sizes, rows, room)
            self._gate_up(x, each.gate_up, room, num_squares)
            num_squares = self._add(room.wide, x, each.down, room)
        return x

    def _room(self, x: Tensor, step: StepInput) -> _Room:
        num_rows, hidden, device = len(x), x.shape[1], x.device
        shapes = [each.attend.shape for each in self._layers]
        widest = max(shapes, key=lambda shape: shape.num_heads * shape.head_dim)
        q, mixed = (x.new_empty(num_rows, widest.num_heads, widest.head_dim) for _ in range(2))
        inner = max(each.gate_up.weight.weight.shape[0] // 2 for each in self._layers)
        most = max(num_parts(shape, max(step.kv_lens)) for shape in shapes)
        together = num_rows if _joins_early(widest, num_rows, most) else parts_together(widest, num_rows, most)
        return _Room(
            q=q,
            mixed=mixed,
            wide=x.new_empty(num_rows, inner),
            squares=torch.empty(triton.cdiv(hidden, _LEAST_COLUMNS), num_rows, dtype=torch.float32, device=device),
            parts=new_parts(widest, together, 1 if _joins_early(widest, num_rows, most) else most, device),
        )

    def _qkv(  # noqa: PLR0917 - a launch's
        self, x: Tensor, each: _Layer, kv: Tensor, sizes: PoolSizes, rows: AttentionInput, room: _Room, num_squares: int
    ) -> None:
        shape, norm, w = each.rope.shape, each.qkv.norm, each.qkv.weight
        assert norm is not None
        tile, num_rows = _row_tile(len(x)), len(x)
        half = triton.next_power_of_2(shape.head_dim // 2)
        chained_qkv[shape.num_heads + 2 * shape.num_kv_heads, triton.cdiv(num_rows, tile)](
            x, room.squares, norm.weight, w.weight, w.weight if w.bias is None else w.bias, each.rope.rope,
            rows.positions, rows.kv_slots, x if shape.q_norm is None else shape.q_norm,
            x if shape.k_norm is None else shape.k_norm, room.q, kv, each.rope.layer, num_rows, num_squares,
            x.shape[1], norm.eps, shape.norm_eps,
            WIDE=norm.weight.dtype != x.dtype, HAS_BIAS=w.bias is not None,
            GROUP=shape.num_heads // shape.num_kv_heads, HALF=max(16, half), NORM_Q=shape.q_norm is not None,
            NORM_K=shape.k_norm is not None, ROWS=tile, BLOCK_K=64, STAGES=4,
            **sizes.constants(), **self._launch | {"num_warps": 2 if half <= 64 else 8},
        )  # fmt: skip

    def _attend(  # noqa: PLR0917 - a launch's
        self, x: Tensor, each: _Layer, kv: Tensor, sizes: PoolSizes, rows: AttentionInput, room: _Room
    ) -> int:
        """Launches 2 and 3, and the one between them; the number of sums of squares."""
        shape, num_rows = each.attend.shape, len(x)
        most = num_parts(shape, max(rows.kv_lens))
        parts, tiling = room.parts._replace(max_parts=most), self._attention.decode_tiling(shape, sizes)
        early = most > 1 and _joins_early(shape, num_rows, most)
        late = most > 1 and not early and _joins_late(shape, each.out.weight, num_rows, most)
        together = num_rows if early or late or most == 1 else len(parts.values)
        for first in range(0, num_rows, together):
            launch_parts(
                room.q, room.mixed, shape, kv, sizes, each.attend.layer, rows, parts, tiling,
                first=first, joined=early, ahead=self._ahead,
            )  # fmt: skip
            if most > 1 and not early and not late:
                launch_join(room.mixed, shape, rows, parts, first=first, ahead=self._ahead)
        return self._join_add(x, each, rows, room, parts) if late else self._add(room.mixed, x, each.out, room)

    def _join_add(self, x: Tensor, each: _Layer, rows: AttentionInput, room: _Room, parts: DecodeParts) -> int:
        shape, w = each.attend.shape, each.out.weight
        num_rows, width = x.shape
        tile = _LATE_WEIGHTS // (shape.num_heads * shape.head_dim)
        chained_join_add[triton.cdiv(width, tile), num_rows](
            room.mixed, parts.values, parts.sums, rows.context_lens, shape.sinks, w.weight,
            w.weight if w.bias is None else w.bias, x, room.squares, num_rows, width, parts.max_parts,
            float(each.out.scale),
            HAS_BIAS=w.bias is not None, HEADS=shape.num_heads, HEAD_DIM=shape.head_dim, SPLIT=SPLIT,
            WINDOW=shape.window or 0, SINKS=shape.sinks is not None, BLOCK_W=tile, **self._launch | {"num_warps": 8},
        )  # fmt: skip
        return -(-width // tile)

    def _gate_up(self, x: Tensor, op: NormGateUp, room: _Room, num_squares: int) -> None:
        norm, w, num_rows = op.norm, op.weight, len(x)
        assert norm is not None
        width = w.weight.shape[0] // 2
        columns, tile = _column_tile(width), _row_tile(num_rows)
        chained_gate_up[triton.cdiv(width, columns), triton.cdiv(num_rows, tile)](
            x, room.squares, norm.weight, w.weight, w.weight if w.bias is None else w.bias, room.wide, num_rows,
            num_squares, x.shape[1], width, norm.eps,
            ACTIVATION=op.activation, WIDE=norm.weight.dtype != x.dtype, HAS_BIAS=w.bias is not None,
            BLOCK_W=columns, ROWS=tile, BLOCK_K=128, STAGES=4, **self._launch,
        )  # fmt: skip

    def _add(self, a: Tensor, x: Tensor, op: LinearAdd, room: _Room) -> int:
        """x += a projection of the rows of a; the number of sums of squares."""
        w, (num_rows, width) = op.weight, x.shape
        columns, tile = _column_tile(width), _row_tile(num_rows)
        chained_add[triton.cdiv(width, columns), triton.cdiv(num_rows, tile)](
            a, w.weight, w.weight if w.bias is None else w.bias, x, room.squares, num_rows, w.weight.shape[1], width,
            float(op.scale),
            HAS_BIAS=w.bias is not None, BLOCK_W=columns, ROWS=tile, BLOCK_K=128, STAGES=4, **self._launch,
        )  # fmt: skip
        return -(-width // columns)


def bind_decodes(attention: TritonAttention, program: Sequence[LayerOp], *, ahead: bool) -> BoundDecodes | None:
    """Bind a step of decodes like `KernelSet.bind_decodes`."""
    layers, rest = [], [op for op in program if not isinstance(op, KeepSampled)]
    while rest:
        layer = _layer(rest[:6])
        if layer is None:
            return None
        layers.append(layer)
        rest = rest[6:]
    sizes = {(each.attend.shape.num_heads, each.attend.shape.head_dim) for each in layers}
    inner = {each.gate_up.weight.weight.shape[0] for each in layers}
    return DecodeChain(attention, layers, ahead=ahead) if len(sizes) == len(inner) == 1 else None


def _layer(ops: Sequence[LayerOp]) -> _Layer | None:
    match ops:
        case [
            NormLinear() as qkv,
            RopeWrite() as rope,
            Attend() as attend,
            LinearAdd(source="mixed", to="x") as out,
            NormGateUp() as gate_up,
            LinearAdd(source="wide", to="x") as down,
        ]:
            pass
        case _:
            return None
    shape = rope.shape
    served = (
        all(_is_plain(op.norm) for op in (qkv, gate_up))
        and all(isinstance(op.weight, Linear) and op.weight.weight.is_contiguous() for op in (qkv, out, gate_up, down))
        and not (shape.row_norms or shape.v_norm or shape.bidirectional or shape.head_dim % 16)
    )
    if not served:
        return None
    return _Layer(qkv=qkv, rope=rope, attend=attend, out=out, gate_up=gate_up, down=down)


def _is_plain(norm: Norm | None) -> bool:
    return norm is not None and not norm.centred


def _row_tile(num_rows: int) -> int:
    return _FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS


def _column_tile(width: int) -> int:
    return 16 if width <= _MOST_NARROW else 32


def _joins_early(shape: AttentionShape, num_rows: int, max_parts: int) -> bool:
    return num_rows * shape.num_kv_heads >= _LEAST_BUSY and max_parts <= _MOST_JOINED_EARLY


def _joins_late(shape: AttentionShape, w: Linear, num_rows: int, max_parts: int) -> bool:
    inputs = shape.num_heads * shape.head_dim
    whole = all(number & (number - 1) == 0 for number in (shape.num_heads, shape.head_dim))
    few = num_rows <= _MOST_LATE_ROWS and num_rows * max_parts <= _MOST_JOINED_LATE
    return (
        whole and few and inputs <= _LATE_WEIGHTS // _LEAST_COLUMNS and len(w.weight) % (_LATE_WEIGHTS // inputs) == 0
    )

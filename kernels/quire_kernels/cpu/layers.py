"""All layers of a model in one call into C++.

Promises: bitwise the results of the ops called one by one; every shape is checked once, when the layers are bound. Must
not know: sampling.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from quire_kernels.cpu.attention import CpuAttention, describe, raise_for
from quire_kernels.cpu.context import Context
from quire_kernels.cpu.signatures import LayerArgs
from quire_kernels.kernel_set import LayerWeights, StepInput


class CpuLayers:
    """The layers of one model, bound to one context."""

    def __init__(
        self, context: Context, attention: CpuAttention, layers: Sequence[LayerWeights], rope: Tensor, eps: float
    ) -> None:
        self._context = context  # keeps the workers
        self._attention = attention
        self._layers = tuple(layers)  # keeps the targets of the addresses below alive
        self._shapes = tuple(attention.shape_args(layer.attention) for layer in self._layers)
        self._rope = rope
        self._eps = eps
        self._run = context.library.quire_layers
        self._width = self._check()
        self._args = (LayerArgs * len(self._layers))(
            *(
                LayerArgs(
                    attention_norm=layer.attention_norm.data_ptr(),
                    qkv=layer.qkv.address,
                    attention=ctypes.addressof(shape),
                    o=layer.o.address,
                    mlp_norm=layer.mlp_norm.data_ptr(),
                    gate_up=layer.gate_up.address,
                    down=layer.down.address,
                )
                for layer, shape in zip(self._layers, self._shapes, strict=True)
            )
        )

    def __call__(self, x: Tensor, kv: Tensor, step: StepInput) -> Tensor:
        """x [T, H] -> the sampled rows [S, H] after all layers; x's memory is reused."""
        if x.dtype != torch.bfloat16 or x.shape != (step.positions.shape[0], self._width) or not x.is_contiguous():
            raise ValueError(f"x must be contiguous bfloat16 [{step.positions.shape[0]}, {self._width}]")
        sampled = None if step.sampled is None else describe(step.sampled)
        if sampled is not None:
            _check_rows(step.sample_rows, sampled.rows, x.shape[0])
        last = len(self._layers) - 1
        pool = self._attention.pool_args(kv, self._layers[last].attention, last)
        failed = self._run(
            self._context.handle,
            self._args,
            len(self._layers),
            self._eps,
            pool,
            byref(describe(step)),
            self._rope.data_ptr(),
            self._rope.shape[0],
            None if sampled is None else byref(sampled),
            None if sampled is None else step.sample_rows.data_ptr(),
            x.data_ptr(),
        )
        raise_for(failed)
        return x if sampled is None else x[: sampled.rows]

    def _check(self) -> int:
        """The width of x. ValueError if two adjacent matrices do not fit."""
        width: int = self._layers[0].qkv.num_inputs
        for layer in self._layers:
            shape = layer.attention
            heads = shape.num_heads * shape.head_dim
            sizes = (
                (layer.qkv.num_inputs, width),
                (layer.qkv.num_outputs, heads + 2 * shape.num_kv_heads * shape.head_dim),
                (layer.o.num_inputs, heads),
                (layer.o.num_outputs, width),
                (layer.gate_up.num_inputs, width),
                (layer.down.num_inputs, layer.gate_up.num_outputs),
                (layer.down.num_outputs, width),
                (layer.attention_norm.numel(), width),
                (layer.mlp_norm.numel(), width),
                (self._rope.shape[1], shape.head_dim),
            )
            if any(found != wanted for found, wanted in sizes):
                raise ValueError(f"the sizes of a layer do not fit together: {sizes}")
            norms = (layer.attention_norm, layer.mlp_norm)
            if any(norm.dtype != torch.bfloat16 or not norm.is_contiguous() for norm in norms):
                raise ValueError("norms must be contiguous bfloat16")
        if self._rope.dtype != torch.float32 or not self._rope.is_contiguous():
            raise ValueError("rope must be contiguous float32")
        return width


def _check_rows(rows: Tensor, count: int, limit: int) -> None:
    """C++ gathers these rows without a check of its own."""
    if rows.dtype != torch.int64 or rows.shape != (count,) or not rows.is_contiguous():
        raise ValueError(f"sample_rows must be contiguous int64 [{count}]")
    if count and (rows[0] < 0 or rows[-1] >= limit or bool((rows.diff() <= 0).any())):
        raise ValueError(f"sample_rows must rise within the step's {limit} rows")

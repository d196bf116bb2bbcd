"""The op *attention* of a kernel set, computed by a library directly over the KV pool.

Promises: keys and values are not copied; no call waits for the device.

The pool is [blocks, layers, 2 (K, V), kv_heads, page, head_dim] of the model's dtype. The arguments for a library
follow from the shapes and from the step's values on the host. So a step that is captured for replay must be captured
with the longest contexts and the most rows of any replay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire_kernels.flash.library import Loaded
from quire_kernels.flash.part import Part, parts_of
from quire_kernels.kernel_set import AttentionInput, AttentionShape

_POOL_DIMS = 6
Attention = Callable[[Tensor, AttentionShape, Tensor, int, AttentionInput], Tensor]  # as `KernelSet` has it


class FlashAttention:
    """Attention of one model by a library, and of layers with softcaps or sinks by the kernels' own."""

    def __init__(self, library: Loaded, own: Attention) -> None:
        self._library, self._own = library, own
        self._step: tuple[AttentionInput, tuple[Part, ...]] | None = None

    def attention(self, q: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput) -> Tensor:
        """As `KernelSet` says. ValueError for a pool that was made for another model."""
        if kv.dim() != _POOL_DIMS or (kv.shape[3], kv.shape[5]) != (shape.num_kv_heads, shape.head_dim):
            raise ValueError("kv was made for another model")
        if kv.dtype != q.dtype:
            raise ValueError(f"kv holds {kv.dtype}, the rows are {q.dtype}")
        if not 0 <= layer < kv.shape[1]:  # a negative one would be taken for another layer
            raise ValueError(f"kv has {kv.shape[1]} layers, there is no layer {layer}")
        if shape.softcap is not None or shape.sinks is not None:
            return self._own(q, shape, kv, layer, step)
        keys, values = (kv[:, layer, half].transpose(1, 2) for half in (0, 1))  # [blocks, page, Hkv, D]
        found = [
            self._library.attend(q[part.first_row : part.first_row + part.num_rows], keys, values, shape, part)
            for part in self._parts(step)
        ]
        if not found:
            return q.flatten(1)
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out.flatten(1)

    def _parts(self, step: AttentionInput) -> tuple[Part, ...]:
        """Computed once for all layers of a step."""
        if self._step is None or self._step[0] is not step:
            self._step = step, parts_of(step, decodes_apart=self._library.decodes_apart)
        return self._step[1]

"""The op *attention* of a kernel set, computed by a library directly over the KV pool.

Promises: keys and values are copied only for a library that needs them in one piece; no call waits for the device.

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
    """Attention of one model by a library, and of layers or rows that it does not compute by the kernels' own."""

    def __init__(self, library: Loaded, own: Attention) -> None:
        self._library, self._own = library, own
        self._step: tuple[AttentionInput, tuple[Part, ...]] | None = None

    def attention(self, q: Tensor, shape: AttentionShape, kv: Tensor, layer: int, step: AttentionInput) -> Tensor:
        """Compute attention like `KernelSet.attention`. ValueError for a pool that was made for another model."""
        if kv.dim() != _POOL_DIMS or (kv.shape[3], kv.shape[5]) != (shape.num_kv_heads, shape.head_dim):
            raise ValueError("kv was made for another model")
        if kv.dtype != q.dtype:
            raise ValueError(f"kv holds {kv.dtype}, the rows are {q.dtype}")
        if not 0 <= layer < kv.shape[1]:  # a negative one would be taken for another layer
            raise ValueError(f"kv has {kv.shape[1]} layers, there is no layer {layer}")
        has_window = shape.window is not None and not self._library.windows
        if has_window or shape.softcap is not None or shape.sinks is not None:
            return self._own(q, shape, kv, layer, step)
        keys, values = (kv[:, layer, half].transpose(1, 2) for half in (0, 1))  # [blocks, page, Hkv, D]
        found = []
        for part in self._parts(step, page=kv.shape[4]):
            rows = q[part.first_row : part.first_row + part.num_rows]
            if part.decodes and not self._library.decodes:
                found.append(self._own(rows, shape, kv, layer, part.rows).view(rows.shape))
            else:
                found.append(self._library.attend(rows, keys, values, shape, part))
        if not found:
            return q.flatten(1)
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out.flatten(1)

    def _parts(self, step: AttentionInput, *, page: int) -> tuple[Part, ...]:
        """Computed once for all layers of a step."""
        if self._step is None or self._step[0] is not step:
            library = self._library
            places = page if library.needs_one_piece else 0
            self._step = step, parts_of(step, decodes_apart=library.decodes_apart, page=places)
        return self._step[1]

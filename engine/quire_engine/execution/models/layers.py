"""The weights of a decoder, in the shape that the kernel set packed them.

Promises: frozen records; one `Layer` holds all that one transformer layer needs.
Must not know: files, tensor names, how an op is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire_kernels.kernel_set import AttentionShape, LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One transformer layer. H hidden, D head_dim, I intermediate."""

    attention_norm: Tensor  # [H]
    qkv: LinearWeight  # H -> (Hq + 2 Hkv) * D
    attention: AttentionShape
    o: LinearWeight  # Hq * D -> H
    mlp_norm: Tensor  # [H]
    gate_up: LinearWeight  # H -> 2 I
    down: LinearWeight  # I -> H


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model. `head` shares memory with `embedding` if the kernel set keeps the matrix as it is."""

    embedding: Tensor  # [V, H]
    layers: tuple[Layer, ...]
    final_norm: Tensor  # [H]
    head: LinearWeight  # H -> V
    rope: Tensor  # [P, D] float32

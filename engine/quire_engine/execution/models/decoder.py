"""The model and its weights: embedding, the program of its layers, final norm and head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.config import ModelConfig
from quire_kernels.kernel_set import (
    BoundLayers,
    ChoiceRows,
    KernelSet,
    LayerOp,
    LinearWeight,
    Norm,
    PoolPart,
)
from quire_kernels.layer_program import matrices, run_layers


class Decoder:
    """A dense decoder-only transformer on one device: one forward for prefill, decode and any mixture."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: KernelSet, *, num_parameters: int) -> None:
        self.config = config
        self.num_parameters = num_parameters
        self._weights = weights
        self._kernels = kernels
        # In the model's dtype, as the reference has it.
        self._embedding_scale: Tensor | None = None
        if config.embedding_scale != 1.0:
            dtype = torch.bfloat16 if weights.embedding is None else weights.embedding
            self._embedding_scale = torch.tensor(config.embedding_scale).to(dtype)
        self._bound: BoundLayers | None = None
        if kernels.bind_layers is not None:
            self._bound = kernels.bind_layers(weights.program)
        self._decodes = None if kernels.bind_decodes is None else kernels.bind_decodes(weights.program)

    @property
    def chains_decodes(self) -> bool:
        """Whether the kernels have the layers of decodes in fewer launches, beside single ops."""
        return self._decodes is not None

    @property
    def packed_bytes(self) -> int | None:
        """Memory of all packed matrices, the head included; None: the kernel set keeps them as they are.

        Without an embedding that is packed beside the head.
        """
        size = self._kernels.packed_bytes
        if size is None:
            return None
        return size(self._weights.head) + sum(map(size, matrices(self._weights.program)))

    @torch.inference_mode()
    def forward(self, step: ModelInput, kv: Tensor) -> Tensor:
        """The sample rows' last hidden states [S, H], before the final norm. Writes every row's K and V into `kv`.

        Raises ValueError for a part of a prompt where rows see what is behind them.
        """
        if self.config.bidirectional and tuple(step.query_lens) != tuple(step.kv_lens):
            raise ValueError("a prompt of a bidirectional model must be computed whole")
        x, pool = self.embed(step.input_ids), self._pool(kv)
        if self._decodes is not None and step.adapters is None and not step.single_ops:
            decoded = self._decodes(x, pool, step)
            if decoded is not None:
                return decoded
        if self._bound is not None:
            return self._bound(x, pool, step, step.adapters)
        return run_layers(self._kernels, self._weights.program, x, pool, step, step.adapters)

    def _pool(self, kv: Tensor) -> list[Tensor]:
        """The parts of the pool, one for each kind of heads."""
        parts = self._weights.parts
        if len(parts) == 1:
            return [kv]
        heads = parts[0].num_kv_heads, parts[0].head_dim
        return [self._kernels.kv_part(kv, heads, part) for part in parts]

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [T] to the rows that the first layer gets, [T, H]."""
        if self._weights.embedding is not None:
            x = self._kernels.embed(self._weights.embedding, ids)
        elif self._kernels.embed_stored is not None:
            x = self._kernels.embed_stored(self._weights.stored_embedding, ids)
        else:
            raise ValueError(f"the {self._kernels.name} kernels look up no rows of an embedding that is quantised")
        return x if self._embedding_scale is None else x * self._embedding_scale

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H], as `forward` returns them, after the final norm: [S, H] float64, row by row the same.

        Only operations on single numbers are used, since each of them gives the same bits in any shape.
        """
        wide, norm = hidden.to(torch.float64), self._weights.final_norm
        if norm.centred:
            wide = wide - _row_sums(wide) / wide.shape[1]
        scale = torch.sqrt(_row_sums(wide * wide) / wide.shape[1] + norm.eps)
        return wide / scale * norm.weight.to(torch.float64)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [S, H], as `forward` returns them, to float32 logits [S, V]."""
        found = self._kernels.logits(hidden, self._weights.final_norm, self._weights.head)
        config = self.config
        if config.logit_divisor != 1.0:
            found.div_(config.logit_divisor)
        if config.logit_factor != 1.0:
            found.mul_(config.logit_factor)
        if config.logit_cap is not None:
            # On a CPU torch rounds the last elements of an array differently, so each row is one.
            for row in found if found.device.type == "cpu" else [found]:
                row.div_(config.logit_cap).tanh_().mul_(config.logit_cap)
        return found

    @torch.inference_mode()
    def greedy(self, hidden: Tensor, allowed: Tensor | None = None) -> tuple[list[int], list[bool]] | None:
        """The argmax of each row of `logits(hidden)` and whether the row is finite; None: take it from the logits.

        Of the columns that have a bit in `allowed`, as `KernelSet.greedy` has it.
        """
        config = self.config
        scaled = config.logit_divisor != 1.0 or config.logit_factor != 1.0 or config.logit_cap is not None
        if self._kernels.greedy is None or scaled:  # a rounding may make two logits equal
            return None
        return self._kernels.greedy(hidden, self._weights.final_norm, self._weights.head, allowed)

    @torch.inference_mode()
    def choose(self, logits: Tensor, rows: ChoiceRows) -> tuple[Tensor, Tensor, Tensor]:
        """The next tokens from `logits(hidden)`, chosen on the device without waiting for it, as `KernelSet.choose`."""
        if self._kernels.choose is None:
            raise ValueError(f"the {self._kernels.name} kernels choose no tokens")
        return self._kernels.choose(logits, rows)


def _row_sums(values: Tensor) -> Tensor:
    """[S, 1] of [S, H]: sums by halves, which are operations on single numbers."""
    while (width := values.shape[1]) > 1:
        half = width // 2
        sums = values[:, :half] + values[:, half : 2 * half]
        values = torch.cat([sums, values[:, 2 * half :]], dim=1) if width % 2 else sums
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A whole model. `head` shares memory with `embedding` if the kernel set keeps the matrix as it is."""

    embedding: Tensor | None  # [V, H]; None: it is stored quantised
    program: tuple[LayerOp, ...]  # of all layers, in order
    parts: tuple[PoolPart, ...]  # of the pool that they are for
    final_norm: Norm  # [H]
    head: LinearWeight  # H -> V
    stored_embedding: LinearWeight | None = None  # the head, where both are one

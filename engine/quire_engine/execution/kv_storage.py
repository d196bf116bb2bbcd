"""The KV pool's memory.

Promises: allocated once, zeroed; the layout is the kernel set's, the block its first dimension.
Must not know: who owns which block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire_engine.execution.models.config import ModelConfig
from quire_kernels.kernel_set import KernelSet


def block_bytes(kernels: KernelSet, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return kernels.kv_block_bytes(config.num_layers, config.num_kv_heads, block_size, config.head_dim, dtype)


class KVStorage:
    """All blocks' keys and values. `tensor` is what the model's ops take."""

    def __init__(  # noqa: PLR0917 - what a pool is made of
        self,
        kernels: KernelSet,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._copy = kernels.copy_blocks
        self.tensor = kernels.new_kv(
            num_blocks, config.num_layers, config.num_kv_heads, block_size, config.head_dim, dtype, device
        )

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each; all sources are read before any target is written."""
        if not pairs:
            return
        if self._copy is not None:
            self._copy(self.tensor, pairs)
            return
        indices = torch.tensor(pairs, device=self.tensor.device)  # [n, 2]
        self.tensor[indices[:, 1]] = self.tensor[indices[:, 0]]

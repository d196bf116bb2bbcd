"""How many bytes the KV pool may take on the device that the model runs on, before the weights are loaded and after.

Promises: one `PoolMemory` for each kind of device; what cannot be is a ConfigError with the fix.
Must not know: the pool's layout, who schedules.
"""

from __future__ import annotations

from typing import Protocol

import torch

from quire_engine.config import EngineConfig
from quire_engine.execution.memory.cpu import CpuMemory
from quire_engine.execution.memory.gpu import GpuMemory
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.decoder import Decoder
from quire_engine.memory_plan import PoolSize
from quire_kernels.kernel_set import KernelSet


class PoolMemory(Protocol):
    """The memory of one kind of device, for one model and configuration."""

    max_useful_seqs: int | None  # more sequences of full length than these are not worth memory; None: any are

    def before_load(self, weights_bytes: int) -> int:
        """Bytes for the pool, as far as they can be known without the weights. Raises ConfigError."""
        ...

    def positions(self, planned: PoolSize) -> int:
        """The longest sequence that the model must be prepared for, when `planned` is what `before_load` came to."""
        ...

    def after_load(self, decoder: Decoder) -> int | None:
        """Bytes for the pool beside the loaded weights; None: those planned before. Raises ConfigError."""
        ...


def pool_memory(
    asked: EngineConfig,
    model: ModelConfig,
    kernels: KernelSet,
    *,
    dtype: torch.dtype,
    device: torch.device,
    staging_bytes: int = 0,
) -> PoolMemory:
    """The one for `device`; `staging_bytes` of a GPU's memory are for swaps."""
    if device.type == "cpu":
        return CpuMemory(asked)
    return GpuMemory(asked, model, kernels, dtype=dtype, device=device, staging_bytes=staging_bytes)

"""The KV pool's share of a GPU's memory.

Promises: estimated before the load; after it, what is really left beside what the largest step really takes.
Must not know: the pool's layout, how a step is measured.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from quire_engine.config import EngineConfig
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.workspace import estimate_workspace, measure_workspace
from quire_engine.memory_plan import PoolSize, bytes_text, gpu_pool_bytes
from quire_kernels.kernel_set import KernelSet

_log = logging.getLogger(__name__)


class GpuMemory:
    """See `PoolMemory`."""

    max_useful_seqs: int | None = None  # the GPU is ours, and prefixes fill what sequences leave

    def __init__(
        self,
        asked: EngineConfig,
        model: ModelConfig,
        kernels: KernelSet,
        *,
        dtype: torch.dtype,
        device: torch.device,
        staging_bytes: int = 0,
    ) -> None:
        self._staging_bytes = staging_bytes
        # The pool's size, and with it the longest sequence, is known only when a step has been measured.
        self._asked = replace(asked, max_model_len=asked.max_model_len or model.max_position_embeddings)
        self._model = model
        self._kernels = kernels
        self._dtype = dtype
        self._device = device

    def before_load(self, weights_bytes: int) -> int:
        return self._pool_bytes(weights_bytes, estimate_workspace(self._model, self._kernels, self._asked))

    def positions(self, planned: PoolSize) -> int:
        """The measured pool may hold a longer one than the planned."""
        del planned
        return self._asked.max_model_len or self._model.max_position_embeddings

    def after_load(self, decoder: Decoder) -> int:
        workspace = measure_workspace(decoder, self._kernels, self._asked, dtype=self._dtype, device=self._device)
        _log.info("a step takes up to %s of GPU memory beside the weights", bytes_text(workspace))
        return self._pool_bytes(0, workspace)

    def _pool_bytes(self, weights_to_come: int, workspace: int) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return gpu_pool_bytes(
            total=total,
            free=free - weights_to_come,
            utilization=self._asked.gpu_memory_utilization,
            workspace=workspace + self._staging_bytes,
            kv_memory=self._asked.kv_memory,
        )

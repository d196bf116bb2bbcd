"""The KV pool's share of host memory.

Promises: the machine is rarely ours alone, so the default is a part of what is free and never more than the running
sequences can fill. Must not know: the pool's layout.
"""

from __future__ import annotations

from quire_engine.config import EngineConfig
from quire_engine.errors import ConfigError
from quire_engine.execution.models.decoder import Decoder
from quire_engine.machine import available_memory
from quire_engine.memory_plan import PoolSize, bytes_text, cpu_pool_bytes


class CpuMemory:
    """See `PoolMemory`. All is decided before the load: the weights take what was counted."""

    def __init__(self, asked: EngineConfig) -> None:
        self._kv_memory = asked.kv_memory
        self.max_useful_seqs = asked.limits.max_num_seqs if asked.kv_memory is None else None

    def before_load(self, weights_bytes: int) -> int:
        available = available_memory()
        if weights_bytes >= available:
            raise ConfigError(
                f"the weights need {bytes_text(weights_bytes)} of memory and {bytes_text(available)} are available;"
                " set dtype to bfloat16 or use a smaller model"
            )
        return cpu_pool_bytes(available - weights_bytes, self._kv_memory)

    def positions(self, planned: PoolSize) -> int:
        return planned.max_model_len

    def after_load(self, decoder: Decoder) -> None:
        del decoder

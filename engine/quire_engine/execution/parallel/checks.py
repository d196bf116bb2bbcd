"""Refuses by name the settings and models that ranks cannot serve, before a weight is read.

Must not know: processes.
"""

from __future__ import annotations

import torch

from quire_engine.config import EngineConfig
from quire_engine.errors import ConfigError
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.served import ModelFacts
from quire_engine.ranks import dividing
from quire_kernels.kernel_set import KernelSet


def check_ranks(
    asked: EngineConfig, model: ModelFacts, kernels: KernelSet, device: torch.device, implementation: str
) -> None:
    """Raises ConfigError where the settings, the model or the machine do not go with several ranks."""
    size = asked.tensor_parallel_size
    if size == 1:
        return
    normed_rows = isinstance(model, ModelConfig) and model.family.qk_norm == "row"
    possible = dividing(model.num_heads, model.kv_heads, model.num_heads, normed_rows=normed_rows)
    counts = sorted({heads.number for heads in model.kv_heads})
    reasons = (
        (device.type != "cpu", "ranks compute on a CPU only; set device to cpu"),
        (bool(implementation), "the model is computed by transformers' code, which is not divided among ranks"),
        (kernels.join is None, f"the {kernels.name} kernels are not divided among ranks; set kernels to cpu"),
        (
            size not in possible,
            f"{model.num_heads} heads, and {' or '.join(map(str, counts))} of keys, are not divided among so many"
            f" ranks; set it to {_listed(possible)}",
        ),
    )
    reason = next((text for applies, text in reasons if applies), "")
    if reason:
        raise ConfigError(f"tensor_parallel_size={size}: {reason}")


def _listed(numbers: list[int]) -> str:
    """1, 2 or 4."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last

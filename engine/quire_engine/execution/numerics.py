"""The facts that the bits of an engine's results depend on, beside the request, and their name.

Replicas of one name compute the same tokens.

Not in it: the size of the pool, threads, limits, guessed tokens, the number of processes that share the work.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch

from quire_engine.contract.config import EngineConfig
from quire_engine.execution.models.checkpoint import fingerprint
from quire_kernels.kernel_set import KernelSet

Facts = tuple[object, ...]


def numeric_facts(
    asked: EngineConfig,
    kernels: KernelSet,
    *,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str,
    replaced_ops: Sequence[str],
) -> Facts:
    """All of them, in an order that stays. `implementation`: whose code computes the model; empty: ours."""
    return (
        fingerprint(Path(asked.model)),
        dtype,
        asked.quantization,
        asked.kv_cache_dtype,
        implementation,
        kernels.name,
        kernels.variant,
        tuple(replaced_ops),
        asked.attention,
        asked.deterministic,
        platform.machine() if device.type == "cpu" else torch.cuda.get_device_name(device),
        torch.__version__,
        version("quire"),
    )


def numerics_name(facts: Facts) -> str:
    """The name of these numerics: 64 hexadecimal digits."""
    return sha256(repr(facts).encode()).hexdigest()

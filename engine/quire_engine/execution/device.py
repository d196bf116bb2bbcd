"""Chooses the device that a model runs on, and the type that it is computed in there.

Promises: where there is a GPU that cannot be used, the reason is logged or raised. Must not know: models.
"""

from __future__ import annotations

import logging

import torch

from quire_engine.contract.errors import ConfigError
from quire_engine.machine import usable_cores, why_no_gpu

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(asked: str) -> torch.device:
    """`auto` is a GPU that can be used, else the CPU. Raises ConfigError."""
    if asked not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={asked} is unknown; set device to auto, cpu or cuda")
    if asked == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    reason = unused_gpu()
    if asked == "cuda":
        because = f": {reason}" if reason else ""
        raise ConfigError(f"device=cuda, but torch finds no usable GPU{because}; set device to cpu or auto")
    if reason:
        _log.warning("computing on the CPU: %s", reason)
    return torch.device("cpu")


def own_dtype(stored: str, device: torch.device, kernels: str) -> str:
    """The type for a checkpoint's own, where none is asked for: on a CPU only the reference kernels have float16."""
    return "bfloat16" if stored == "float16" and device.type == "cpu" and kernels != "reference" else stored


def compute_dtype(asked: str, stored: str, device: torch.device, kernels: str) -> tuple[torch.dtype, str]:
    """The type that a model is computed in, and the reason where it is neither asked for nor the checkpoint's.

    Raises ConfigError.
    """
    name = own_dtype(stored, device, kernels) if asked == "auto" else asked
    if name not in _DTYPES:
        raise ConfigError(f"dtype={name} is unknown; set dtype to auto, {', '.join(_DTYPES)}")
    if asked != "auto" or name == stored:
        return _DTYPES[name], ""
    reason = f"{stored} weights are computed in {name} by the C++ kernels; set dtype to {stored} to keep them"
    return _DTYPES[name], f"{reason}, many times slower"


def torch_threads(weights_bytes: int) -> int:
    """Return how many of torch's threads kernels compute on: one and another one per quarter GiB of weights.

    With smaller weights torch's threads wait for each other longer than they compute, and a hundred times as long when
    another process takes one of their cores.
    """
    return min(usable_cores(), 1 + weights_bytes // (256 << 20))


def gpu_name(device: torch.device) -> str:
    """The UUID by which the driver knows a GPU; empty for a CPU, and with a torch that does not tell it."""
    if device.type != "cuda":
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return uuid if uuid.startswith(("GPU-", "MIG-")) or not uuid else f"GPU-{uuid}"


def unused_gpu() -> str | None:
    """Why this machine's GPU is not used; None where there is none, or where it can be used."""
    if torch.cuda.is_available():
        return None
    return why_no_gpu(torch.version.cuda, _cuda_error())


def _cuda_error() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:  # an AssertionError where torch is built without CUDA
        return str(error)
    return ""

"""Facts about the machine and the installed versions for a report.

Promises: no names of users, hosts or files.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from quire_engine.execution.device import unused_gpu
from quire_engine.machine import available_memory, gpu_driver, usable_cores

_PACKAGES = ("quire", "torch", "triton", "numpy", "flash-attn")


def machine_facts() -> dict[str, Any]:
    """The facts as values for JSON."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "system": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "cores_of_machine": os.cpu_count(),
        "available_memory": available_memory(),
        "torch_cuda": torch.version.cuda,
        "gpu_driver": gpu_driver() or None,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "why_no_gpu": unused_gpu(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpu(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory": found.total_memory,
        "multiprocessors": found.multi_processor_count,
    }


def _processor(file: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()

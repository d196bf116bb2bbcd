"""The Triton kernels' tests run in a process of their own, in one of three ways; elsewhere they are not collected.

`TRITON_INTERPRET=1 pytest tests/kernels/triton` by Triton's interpreter on the CPU (part of `make test`),
`tests/kernels/triton/sanitize.sh` with every access checked (part of `make kernel-sim`), and
`QUIRE_TRITON_DEVICE=cuda pytest tests/kernels/triton` on a GPU (part of `make gpu-test`).
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SANITIZED = "ttsem" in sys.modules

if importlib.util.find_spec("triton") is None or not (
    INTERPRETED or SANITIZED or os.environ.get("QUIRE_TRITON_DEVICE")
):
    collect_ignore_glob = ["test_*.py"]
elif INTERPRETED:
    from support.triton_interpreter import repair

    repair()
elif SANITIZED:
    torch.Tensor.pin_memory = lambda self, *_: self  # its GPU is the CPU, which has nothing to pin memory for


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Memory that nobody wrote is NaN: what `torch.empty` gives is filled."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def simulator() -> str:
    return "sanitizer" if SANITIZED else "interpreter" if INTERPRETED else "device"

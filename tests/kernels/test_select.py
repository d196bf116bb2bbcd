"""The choice of a kernel set."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.kernel_set import select
from quire_kernels.reference import REFERENCE


def test_the_reference_set_serves_every_device():
    for device in ("cpu", "cuda"):
        assert select(torch.device(device), torch.bfloat16, "reference") is REFERENCE


def test_the_cpu_kernels_are_the_default_for_bf16_on_a_cpu_only():
    assert select(torch.device("cpu"), torch.bfloat16).name == "cpu"
    assert select(torch.device("cpu"), torch.float32) is REFERENCE
    assert select(torch.device("cuda"), torch.bfloat16) is REFERENCE


def test_an_unknown_name_or_dtype_is_refused():
    with pytest.raises(ValueError, match="no kernel set named 'fast'"):
        select(torch.device("cpu"), torch.float32, "fast")
    with pytest.raises(ValueError, match="float64"):
        select(torch.device("cpu"), torch.float64)

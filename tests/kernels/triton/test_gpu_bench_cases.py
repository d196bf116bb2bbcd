"""What `make gpu-bench` calls each kernel with is what the kernels take, the choice of tokens among them."""

from __future__ import annotations

import torch

from gpu.kernels import KernelBench, KernelSizes
from gpu.shapes import TINY
from quire_kernels.triton.set import make_triton_set
from support.guarded import DEVICE

SIZES = KernelSizes(rows=(1, 2), decodes=((2, 20),), prefills=(20,), operand_bytes=1, repeat=1)


def test_every_case_runs():
    names = []
    with torch.inference_mode():
        for case in KernelBench(make_triton_set(), TINY, SIZES, DEVICE)._cases():
            case.work(case.calls - 1)
            names.append(case.name)
    assert "choice, temperature" in names
    assert len(names) == 2 * 3 + 2 + 2

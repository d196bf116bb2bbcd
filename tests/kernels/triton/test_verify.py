"""The Triton set under the checks that a server's start makes of it on a GPU."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.triton.set import make_triton_set
from quire_kernels.verify.checks import ModelSizes, short_checks
from quire_kernels.verify.findings import Subject
from quire_kernels.verify.heads import Heads
from quire_kernels.verify.watch import run_checks
from support.guarded import DEVICE

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
SIZES = ModelSizes(hidden=64, inner=96, heads=HEADS, vocabulary=200)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("dtype", "kv_type", "deterministic"),
    [(torch.bfloat16, "auto", True), (torch.bfloat16, "fp8", False), (torch.float16, "auto", False)],
)
def test_the_set_passes(dtype, kv_type, deterministic):
    kernels = make_triton_set(kv_type=kv_type, deterministic=deterministic)
    subject = Subject(kernels=kernels, device=DEVICE, dtype=dtype, kv_type=kv_type, alone=deterministic)
    found = list(run_checks(short_checks(subject, SIZES), device=DEVICE, patience=600.0))
    assert {each.op for each in found} >= {"norm_linear", "rope_write", "attention", "greedy"}
    assert not [each for each in found if not each.ok]

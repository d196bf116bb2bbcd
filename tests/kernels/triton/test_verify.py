"""The Triton set under the checks that a server's start makes of it on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire_kernels.optional_paths import FUSED_GATE_UP, NAMES
from quire_kernels.triton.set import make_triton_set
from quire_kernels.verify import layers
from quire_kernels.verify.checks import ModelSizes, short_checks
from quire_kernels.verify.findings import Subject
from quire_kernels.verify.heads import Heads
from quire_kernels.verify.linear import LinearChecks, Matrix
from quire_kernels.verify.watch import run_checks
from support.guarded import DEVICE

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
SIZES = ModelSizes(hidden=64, inner=96, heads=HEADS, vocabulary=200)


@pytest.mark.parametrize("kv_type", ["auto", pytest.param("fp8", marks=pytest.mark.sim)])
def test_layers_of_decodes_are_held_to_single_ops(kv_type, monkeypatch):
    """As they are, and with the rows of another step: 3 sequences there, of 4 rows whose bits are compared alone."""
    monkeypatch.setattr(layers, "_DECODED", (300, 5, 1, 2))
    kernels = make_triton_set(kv_type=kv_type, chained=True)
    subject = Subject(kernels=kernels, device=DEVICE, dtype=torch.bfloat16, kv_type=kv_type)
    found = layers.decodes_check(subject, HEADS, hidden=64, inner=96).run()
    assert (found.problem, found.alone) == ("", True)
    assert 0 < found.share <= 1

    def wrong(program):
        bound = kernels.bind_decodes(program)
        return lambda x, kv, step: bound(x, kv, step).mul_(1.1)

    subject = replace(subject, kernels=replace(kernels, bind_decodes=wrong))
    assert "are allowed" in layers.decodes_check(subject, HEADS, hidden=64, inner=96).run().problem


def test_columns_of_a_rank_are_held_to_the_whole_matrix():
    """A tile's width that follows from the rank's own columns, with sums that follow from the tile, is found."""

    def found(subject: Subject) -> dict[str, tuple[str, bool | None]]:
        checks = LinearChecks(subject, Matrix(outputs=200, inputs=64), "normal", (3, 70)).column_checks()
        return {check.op: (outcome.problem, outcome.alone) for check in checks for outcome in [check.run()]}

    kernels = make_triton_set(deterministic=True)
    subject = Subject(kernels=kernels, device=DEVICE, dtype=torch.bfloat16, alone=True)
    assert found(subject) == {"norm_linear": ("", True), "norm_gate_up": ("", True)}

    def wrong(x, norm, w):
        return kernels.norm_linear(x, norm, w) * (1 + w.of / 1000)

    planted = replace(kernels, norm_linear=wrong)
    assert "columns" in found(replace(subject, kernels=planted))["norm_linear"][0]
    assert found(replace(subject, kernels=planted, alone=False))["norm_linear"] == ("", False)


def test_gate_and_up_without_their_activation_pass():
    kernels = make_triton_set(deterministic=True, left_out=[FUSED_GATE_UP])
    subject = Subject(kernels=kernels, device=DEVICE, dtype=torch.bfloat16, alone=True)
    checks = LinearChecks(subject, Matrix(outputs=200, inputs=64), "normal", (1, 7)).checks()
    found = [check.run().problem for check in checks if check.op == "norm_gate_up"]
    assert found
    assert not any(found)


@pytest.mark.sim
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_set_with_quantised_weights_passes(quantization):
    kernels = make_triton_set(quantization=quantization, deterministic=True)
    subject = Subject(kernels=kernels, device=DEVICE, dtype=torch.bfloat16, quantization=quantization, alone=True)
    found = list(run_checks(short_checks(subject, SIZES), device=DEVICE, patience=600.0))
    assert {each.op for each in found} >= {"pack_linear", "norm_linear", "linear_add"}
    assert not [each for each in found if not each.ok]


@pytest.mark.sim
@pytest.mark.parametrize(
    ("dtype", "kv_type", "deterministic", "left_out"),
    [
        (torch.bfloat16, "auto", True, ()),
        (torch.bfloat16, "fp8", False, ()),
        (torch.float16, "auto", False, ()),
        (torch.bfloat16, "auto", False, NAMES),
    ],
)
def test_the_set_passes(dtype, kv_type, deterministic, left_out):
    chained = not deterministic
    kernels = make_triton_set(kv_type=kv_type, deterministic=deterministic, chained=chained, left_out=left_out)
    subject = Subject(kernels=kernels, device=DEVICE, dtype=dtype, kv_type=kv_type, alone=deterministic)
    found = list(run_checks(short_checks(subject, SIZES), device=DEVICE, patience=600.0))
    assert {each.op for each in found} >= {"norm_linear", "rope_write", "attention", "greedy"}
    assert not [each for each in found if not each.ok]

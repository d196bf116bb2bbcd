"""Matrices in int8 and int4 at load: the C++ kernels' numbers, products of them, a whole model."""

from __future__ import annotations

import sys

import pytest
import torch

from quire_engine.contract.errors import ModelLoadError
from quire_engine.demo import demo_model_path
from quire_kernels.kernel_set import KVFormat
from quire_kernels.select import select
from quire_kernels.triton import quantise
from quire_kernels.triton.set import make_triton_set
from support.checkpoints import shared_checkpoint
from support.guarded import DEVICE, guarded
from support.model_steps import Model
from support.planted import planted

KINDS = ("int8", "int4")


def _matrix(rows: int, columns: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(rows + columns)
    found = torch.randn(rows, columns, generator=random) * torch.exp2(torch.arange(rows) % 7 - 3.0)[:, None]
    found[rows // 2] = 0.0
    found[1, ::3] *= 20.0
    return found.bfloat16()


def _by_the_cpu(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The numbers that the C++ kernels have of a matrix: products of them with each row of the identity."""
    kernels = select(
        torch.device("cpu"), torch.bfloat16, "cpu", kv=KVFormat(head_dim=32, block_size=16), quantization=kind
    )
    rows = torch.eye(weight.shape[1], dtype=torch.bfloat16)
    return kernels.norm_linear(rows, None, kernels.pack_linear(weight, None)).T.float()


def _check(module, kind: str) -> None:
    weight = _matrix(70, 96)
    found = module.quantised(weight, kind).dequantised()
    expected = _by_the_cpu(weight, kind)
    alike = (found - expected).abs() <= expected.abs() * 2.0**-7  # a product is rounded, and what it is of, too
    assert alike.float().mean() > (0.998 if kind == "int4" else 0.9999), (~alike).sum()
    error = (found - weight.float()).norm() / weight.float().norm()
    assert error < (0.012 if kind == "int8" else 0.12)


@pytest.mark.skipif("ttsem" in sys.modules or DEVICE.type == "cuda", reason="the CPU's kernels are asked")
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_cpu(kind):
    _check(quantise, kind)


@pytest.mark.skipif("ttsem" in sys.modules or DEVICE.type == "cuda", reason="the CPU's kernels are asked")
@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("int8", "_GROUP, _LARGEST = 32, 127.0", "_GROUP, _LARGEST = 32, 120.0"),
        ("int4", "errors == errors.amin(dim=2, keepdim=True)", "errors == errors.amax(dim=2, keepdim=True)"),
        ("int4", "_LARGEST_BITS = 19,", "_LARGEST_BITS = 21,"),
    ],
)
def test_other_numbers_are_found(kind, old, new, tmp_path):
    with pytest.raises(AssertionError):
        _check(planted(quantise, old, new, tmp_path), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "outputs"), [(96, 70), (75, 33)])
def test_products_are_those_of_the_numbers(kind, columns, outputs):
    weight, bias = _matrix(outputs, columns).to(DEVICE), torch.ones(outputs, dtype=torch.bfloat16, device=DEVICE)
    kernels = make_triton_set(quantization=kind)
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    numbers = quantise.quantised(weight, kind).dequantised().to(DEVICE).double()
    wanted = x.double() @ numbers.T
    packed = kernels.pack_linear(weight, bias)
    with guarded():
        found = kernels.norm_linear(x, None, packed).double()
    assert torch.allclose(found, wanted + 1, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))
    bits = 8 * kernels.packed_bytes(packed) / weight.numel()
    assert bits >= kernels.packed_bits


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(kind):
    weight = _matrix(8, 64)
    weight[3, 5] = torch.inf
    found = quantise.quantised(weight, kind).dequantised()
    assert not torch.isfinite(found[3]).all()
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[others], quantise.quantised(_matrix(8, 64), kind).dequantised()[others])


@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=pytest.mark.sim)])
def test_a_model_is_computed_in_them(kind):
    def model(kernels) -> Model:
        return Model(
            demo_model_path(), dtype=torch.bfloat16, device=str(DEVICE), num_blocks=9, max_model_len=64, kernels=kernels
        )

    plain, small = model(None), model(make_triton_set(quantization=kind))
    ids = tuple(range(20, 33))
    wanted, found = plain.logits(ids)[-1].float(), small.logits(ids)[-1].float()
    assert (found - wanted).norm() / wanted.norm() < (0.05 if kind == "int8" else 0.5)
    assert not torch.equal(found, wanted)
    assert small.decoder.packed_bytes is not None


def test_a_mixture_of_experts_is_refused_by_name():
    with pytest.raises(ModelLoadError, match="the triton kernels compute no experts"):
        Model(
            shared_checkpoint("qwen3_moe"),
            dtype=torch.bfloat16,
            device=str(DEVICE),
            kernels=make_triton_set(quantization="int8"),
        )

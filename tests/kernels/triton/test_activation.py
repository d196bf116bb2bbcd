"""activation(gate) * up: the reference's definition, elementwise, nothing touched beside it."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from quire_kernels.activations import Activation, gated
from quire_kernels.reference.linear import mul_sigmoid
from quire_kernels.triton import activation
from support.guarded import between_guards, guarded
from support.planted import noticed, planted


def _gate_up(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    values = 4 * torch.randn(num_rows, 2 * width, generator=torch.Generator().manual_seed(width))
    values[0, :4] = torch.tensor([0.0, -200.0, 200.0, -89.0])  # where an exponential overflows or vanishes
    return between_guards(values.to(dtype))


def _check(module, width: int, dtype: torch.dtype) -> None:
    gate_up = _gate_up(3, width, dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    for name in get_args(Activation):
        with guarded():
            result = module.gate_mul(gate_up, name)
        expected = gated(gate, up, name).to(dtype)
        assert torch.allclose(result.float(), expected.float(), rtol=1e-2 if dtype is torch.bfloat16 else 1.2e-3)
        assert (result == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [24, 1024, 1500])
def test_it_is_the_reference_activation(width, dtype):
    _check(activation, width, dtype)


def test_a_row_does_not_depend_on_the_others():
    gate_up = _gate_up(3, 100, torch.bfloat16)
    together = activation.gate_mul(gate_up, "silu")
    for row in range(3):
        assert torch.equal(activation.gate_mul(gate_up[row : row + 1], "silu"), together[row : row + 1])
    assert activation.gate_mul(gate_up[:0], "silu").shape == (0, 100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [24, 1500])
def test_rows_times_the_sigmoid_of_a_gate(width, dtype):
    x, gate = (between_guards(part.contiguous()) for part in _gate_up(3, width, dtype).chunk(2, dim=1))
    expected = mul_sigmoid(x.clone(), gate)
    with guarded():
        assert activation.mul_sigmoid(x, gate) is x
    assert torch.allclose(x.float(), expected.float(), rtol=1e-2 if dtype is torch.bfloat16 else 1.2e-3)
    assert (x == expected).float().mean() > 0.99
    assert len(activation.mul_sigmoid(x[:0], gate[:0])) == 0
    with pytest.raises(ValueError, match="is not one of"):
        activation.mul_sigmoid(x, gate[:2])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value.to(out.dtype.element_ty), mask=inside)", "value.to(out.dtype.element_ty))"),
        ("row * 2 * width + width + columns", "row * 2 * width + columns"),
        ('if ACTIVATION == "gelu_tanh"', 'if ACTIVATION != "gelu_tanh"'),
        ('if ACTIVATION == "swiglu_clamped"', 'if ACTIVATION != "swiglu_clamped"'),
    ],
    ids=["unmasked store", "the gate for up", "another activation", "unclamped"],
)
def test_planted_bugs_are_found(old, new, tmp_path):
    with pytest.raises(noticed()):
        _check(planted(activation, old, new, tmp_path), 1500, torch.bfloat16)

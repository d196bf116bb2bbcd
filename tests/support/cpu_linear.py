"""What tests of the C++ projections share: kernel sets of one instruction set, operands, and exact answers.

Promises: operands are fresh for every seed; a bound on an error is derived here once, from the number of roundings.
Must not know: how the kernels compute.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from quire_kernels.activations import Activation
from quire_kernels.cpu.library import load_library
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.cpu.variants import VARIANTS
from quire_kernels.kernel_set import KernelSet, Norm

EPS = 1e-5
FLOAT32_ROUNDING = 2.0**-24
BF16_ROUNDING = 2.0**-8
KINDS = (None, "int8", "int4")
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
# N, K: one panel, remainders of lanes and panels, odd columns, several panels, more columns than a cached slice holds.
SHAPES = ((64, 32), (2, 16), (130, 33), (96, 100), (200, 1024), (40, 8352))


@cache
def kernel_set(variant: str, kind: str | None = None, threads: int = 2) -> KernelSet:
    found = next(each for each in VARIANTS if each.name == variant)
    return cpu_kernel_set(threads, kind, library=load_library(found))


class Operands(NamedTuple):
    """x [M, K], norm [K], weight [N, K], bias [N], residual [M, N]; N even."""

    x: Tensor
    norm: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        gate, up = self.weight.chunk(2)
        return gate, up

    def rows(self, index) -> Operands:
        return self._replace(x=self.x[index], residual=self.residual[index])


def operands(n: int, k: int, m: int, seed: int = 0) -> Operands:
    generator = torch.Generator().manual_seed(hash((n, k, m, seed)))

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    tensors = (normal(m, k), 1 + 0.2 * normal(k), normal(n, k) / k**0.5, normal(n), normal(m, n))
    return Operands(*(tensor.bfloat16() for tensor in tensors))


def run_ops(kernels: KernelSet, given: Operands) -> dict[str, Tensor]:
    """Every projection of a kernel set, with and without bias; the residual is left as it was."""
    weight, bias = given.weight, given.bias
    plain, biased = kernels.pack_linear(weight, None), kernels.pack_linear(weight, bias)
    return apply_ops(kernels, given, plain, biased, kernels.pack_gate_up(*given.halves, bias))


def apply_ops(kernels: KernelSet, given: Operands, plain, biased, gate_up) -> dict[str, Tensor]:
    x, norm, residual = given.x, given.norm, given.residual
    return {
        "norm_linear": kernels.norm_linear(x, Norm(norm, EPS), biased),
        "norm_linear_wide": kernels.norm_linear(x, Norm(norm.float(), EPS), plain),
        "project": kernels.norm_linear(x, None, plain),
        **{f"norm_gate_up {each}": kernels.norm_gate_up(x, Norm(norm, EPS), gate_up, each) for each in ACTIVATIONS},
        "linear_add": kernels.linear_add(x, plain, residual.clone(), 1.0),
        "linear_add_bias": kernels.linear_add(x, biased, residual.clone(), 1.0),
        "linear_add_part": kernels.linear_add(x, plain, residual.clone(), 0.22),
        "norm_add": kernels.norm_add(x, Norm(norm, EPS), x.clone()),
        "norm_add_wide": kernels.norm_add(x, Norm(norm.float(), EPS), x.clone()),
        "mul_sigmoid": kernels.mul_sigmoid(x.clone(), x),
        "logits": kernels.logits(x, Norm(norm, EPS), plain),
    }


def normed_rows(variant: str, given: Operands, norm: Norm | None = None) -> Tensor:
    """The rows as the kernels norm them, seen through a matrix that passes them on exactly."""
    kernels = kernel_set(variant)
    identity = kernels.pack_linear(torch.eye(len(given.norm)).bfloat16(), None)
    return kernels.logits(given.x, norm or Norm(given.norm, EPS), identity)


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """rows @ weight.T + bias in float64, and how far a float32 sum in any order may be from it."""
    rows, weight = rows.double(), weight.double()
    exact, magnitude = rows @ weight.T, rows.abs() @ weight.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    roundings = weight.shape[1] + 2  # one per product and sum, one for the bias
    return exact, 1.01 * roundings * FLOAT32_ROUNDING * magnitude


def assert_within(got: Tensor, exact: Tensor, bound: Tensor) -> None:
    excess = (got.double() - exact).abs() - bound
    assert not (torch.isnan(excess) | (excess > 0)).any(), f"off by {excess.max().item()} more than the bound"

"""Calls of every Triton op at the sizes of real models, for the audit of what they compile to.

Promises: nothing is computed: tensors are uninitialised, launches are noted down in place of being run.
Must not know: how a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire_kernels.kernel_set import ChoiceRows
from quire_kernels.reference.linear import Linear
from quire_kernels.triton.activation import silu_mul
from quire_kernels.triton.choose import choose
from quire_kernels.triton.norm import rms_norm
from quire_kernels.triton.product import TiledProduct

_VOCABULARY = 151_936  # Qwen3's
_HIDDEN = (1024, 4096)  # Qwen3-0.6B's and Llama-3.1-8B's
_BF16 = torch.bfloat16


def _empty(*shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _linear(num_outputs: int, num_inputs: int, dtype: torch.dtype, bias: bool = False) -> Linear:
    return Linear(_empty(num_outputs, num_inputs, dtype=dtype), _empty(num_outputs, dtype=dtype) if bias else None)


def _norms() -> None:
    for width in _HIDDEN:
        rms_norm(_empty(8, width), _empty(width), 1e-6)


def _products(dtype: torch.dtype) -> None:
    product = TiledProduct()
    for num_rows in (8, 1000):
        product.linear(_empty(num_rows, 1024, dtype=dtype), _linear(4096, 1024, dtype, bias=True))
        product.linear_add(
            _empty(num_rows, 3072, dtype=dtype), _linear(1024, 3072, dtype), _empty(num_rows, 1024, dtype=dtype)
        )
    product.linear(_empty(1000, 4096, dtype=dtype), _linear(28672, 4096, dtype))
    product.logits(_empty(8, 1024, dtype=dtype), _linear(_VOCABULARY, 1024, dtype))


def choice_rows(num_rows: int, *, draws: bool = True, limits_k: bool = True, limits_p: bool = True) -> ChoiceRows:
    """Uninitialised parameters of the right types."""
    return ChoiceRows(
        logits_rows=_empty(num_rows, dtype=torch.int64),
        temperature=_empty(num_rows, dtype=torch.float32),
        top_k=_empty(num_rows, dtype=torch.int32),
        top_p=_empty(num_rows, dtype=torch.float64),
        min_p=_empty(num_rows, dtype=torch.float32),
        seed=_empty(num_rows, dtype=torch.int64),
        choice=_empty(num_rows, dtype=torch.int64),
        position=_empty(num_rows, dtype=torch.int64),
        draws=draws,
        limits_k=limits_k,
        limits_p=limits_p,
    )


CASES: dict[str, Callable[[], object]] = {
    "norm": _norms,
    "activation": lambda: silu_mul(_empty(8, 2 * 3072)),
    "product bf16": lambda: _products(_BF16),
    "product fp16": lambda: _products(torch.float16),
    "greedy": lambda: choose(
        _empty(8, _VOCABULARY, dtype=torch.float32), choice_rows(8, draws=False, limits_k=False, limits_p=False)
    ),
    "draw": lambda: choose(_empty(8, _VOCABULARY, dtype=torch.float32), choice_rows(8)),
}

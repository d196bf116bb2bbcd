"""A transformers model's matrices as packed products of ours, whose rows do not depend on each other.

`nn.Linear` and the experts of the registered interface become packed matrices, quantised as our own models' are. Other
parameters that a module multiplies with by itself, such as a router's, stay as they are and multiply rows in tiles of
one size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate

from quire_kernels.activations import Activation
from quire_kernels.kernel_set import ExpertMatrices, KernelSet, LinearWeight

_TILE = 16  # rows of a plain product; torch's order of summation follows the number of rows


class Rows(Protocol):
    """The rows of the present step."""

    @property
    def num_rows(self) -> int: ...  # 0: no step
    @property
    def num_padded(self) -> int: ...  # with those that only fill up


class PackedLinear(nn.Module):
    """A packed matrix in place of an `nn.Linear`."""

    def __init__(
        self, weight: LinearWeight, kernels: KernelSet, rows: Rows, size: tuple[int, int], stub: Stub, *, wide: bool
    ) -> None:
        """`size`: inputs and outputs. `wide`: float32 results, for logits."""
        super().__init__()
        self.in_features, self.out_features = size
        self.packed = weight
        self._kernels, self._rows, self._wide = kernels, rows, wide
        self.weight = stub  # for modules that ask for its type

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features)
        rows = self._rows
        used = rows.num_rows if len(flat) == rows.num_padded else len(flat)
        out = product(self._kernels, flat[:used], self.packed, self.out_features, wide=self._wide)
        if used < len(flat):
            out = F.pad(out, (0, 0, 0, len(flat) - used))
        return out.view(*x.shape[:-1], self.out_features)


class Stub:
    """The type, device and shape of a weight that is packed."""

    def __init__(self, weight: Any) -> None:
        self.dtype, self.device, self.shape = weight.dtype, torch.device("cpu"), weight.shape


def product(kernels: KernelSet, x: Tensor, weight: LinearWeight, width: int, *, wide: bool = False) -> Tensor:
    """x [T, K] times a packed matrix: [T, width]."""
    if kernels.linear is not None:
        return kernels.linear(x, weight, wide)
    out = kernels.linear_add(x, weight, torch.zeros(len(x), width, dtype=x.dtype), 1.0)
    return out.float() if wide else out


def fused_activation(module: Any) -> Activation | None:
    """The activation of an experts module, where it is all that happens between an expert's two products.

    None: the module does more, or something else.
    """
    usual = module.has_gate and module.is_concatenated and not module.has_post_expert_norm
    if not usual or getattr(module._apply_gate, "__func__", None) is not _default_apply_gate:
        return None
    return next((name for key, name in _FUSED.items() if type(module.act_fn) is type(ACT2FN[key])), None)


_FUSED: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class FusedExperts:
    """An experts module whose experts are one op of the kernels."""

    def __init__(self, kernels: KernelSet, experts: ExpertMatrices) -> None:
        """The kernels must have the op."""
        self._kernels, self._experts = kernels, experts

    def compute(self, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See `interface.Computes.experts`."""
        del module
        if self._kernels.given_experts is None:
            raise RuntimeError(f"the {self._kernels.name} kernels compute no experts")
        return self._kernels.given_experts(hidden.contiguous(), index.long(), weights.float(), self._experts)


class PackedExperts:
    """The matrices of one experts module, two for each expert."""

    def __init__(
        self,
        kernels: KernelSet,
        up: list[LinearWeight],
        down: list[LinearWeight],
        widths: tuple[int, int],
        multiple: int,
    ) -> None:
        """`widths`: of what `up` and `down` give. `multiple`: of rows, in which the activation is computed."""
        self.up, self.down = up, down
        self._kernels, self._widths, self._multiple = kernels, widths, multiple

    def compute(self, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See `interface.Computes.experts`. Expert by expert; a row's experts are summed in the order of their rank."""
        rows, rank = index.shape
        flat = index.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=len(self.up)).tolist()
        inputs = hidden[order // rank]
        outputs = torch.zeros(len(inputs), self._widths[1], dtype=hidden.dtype)  # an index beyond the experts adds none
        at = 0
        for expert, count in enumerate(counts[: len(self.up)]):
            if count:
                inner = product(self._kernels, inputs[at : at + count], self.up[expert], self._widths[0])
                inner = self._activated(module, inner)
                outputs[at : at + count] = product(self._kernels, inner, self.down[expert], self._widths[1])
            at += count
        if module.has_post_expert_norm:
            outputs = module.post_expert_norm(outputs)
        back = torch.empty_like(outputs)
        back[order] = outputs
        each = back.view(rows, rank, -1).float() * weights[..., None].float()
        total = each[:, 0]
        for place in range(1, rank):
            total = total + each[:, place]
        return total.to(hidden.dtype)

    def _activated(self, module: Any, inner: Tensor) -> Tensor:
        count = len(inner)
        padded = F.pad(inner, (0, 0, 0, -count % self._multiple))
        active: Tensor = module._apply_gate(padded) if module.has_gate else module.act_fn(padded)
        return active[:count].contiguous()


class TiledMatrix(Tensor):
    """A parameter that a module multiplies with by itself: products are computed in tiles of a fixed number of rows.

    Views of it are such matrices too; every other result is a plain tensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        named = dict(kwargs or {})
        compute = _TILED.get(func, func)
        with torch._C.DisableTorchFunctionSubclass():
            result = compute(*args, **named)
        if getattr(func, "__name__", "") in _VIEWS:
            return _as(cls, result)
        return _as(Tensor, result)


_VIEWS = frozenset(
    {"__getitem__", "t", "transpose", "float", "to", "contiguous", "chunk", "split", "unbind", "permute", "view"}
    | {"__get__", "reshape", "unsqueeze", "squeeze", "type_as", "detach", "select", "narrow"}
)


def _as(kind: type[Tensor], result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.as_subclass(kind)
    if isinstance(result, tuple | list):
        return type(result)(_as(kind, each) for each in result)
    return result


def by_tiles(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """compute(x) for x [..., K] as rows, which it gets in tiles of one size."""
    flat = x.reshape(-1, x.shape[-1])
    tiles = torch.split(F.pad(flat, (0, 0, 0, -len(flat) % _TILE)), _TILE)
    results = [compute(rows) for rows in tiles]
    out = torch.cat(results) if results else flat.new_zeros(0, compute(flat.new_zeros(_TILE, flat.shape[1])).shape[1])
    return out[: len(flat)].view(*x.shape[:-1], out.shape[-1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return by_tiles(lambda rows: F.linear(rows, weight, bias), x)


def _matmul(x: Tensor, other: Tensor) -> Tensor:
    if other.dim() == 2 and x.dim() >= 2:
        return by_tiles(lambda rows: rows @ other, x)
    if other.dim() == 3 and x.dim() == 3 and len(other) == len(x):  # one matrix for each of a batch
        return torch.stack([_matmul(part, each) for part, each in zip(x, other, strict=True)])
    return torch.matmul(x, other)


def _addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * bias + alpha * _matmul(x, weight)


_TILED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.bmm: _matmul,
    Tensor.bmm: _matmul,
    torch.addmm: _addmm,
}

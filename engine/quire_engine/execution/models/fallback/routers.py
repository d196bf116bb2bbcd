"""Routers of a transformers model whose choice an op of the kernels computes.

Promises: a router is replaced only where a small copy of it, with random weights and random rows, chooses and weighs as
the op does. Must not know: sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire_engine.execution.models.fallback.products import Rows
from quire_kernels.kernel_set import KernelSet, Routing, Scoring
from quire_kernels.reference.experts import route
from quire_kernels.reference.linear import pack_linear

_ROWS, _TOLERANCE = 48, 1e-4
_BIAS = "e_score_correction_bias"
# The number that keeps the sum of sigmoids from zero, in DeepSeek-V3 (arXiv:2412.19437) and all that route as it does.
_EPSILON = 1e-20


class FusedRouter(nn.Module):
    """The op in place of a router."""

    def __init__(self, kernels: KernelSet, routing: Routing, count: int, rows: Rows) -> None:
        super().__init__()
        self.routing = routing
        self._kernels, self._count, self._rows = kernels, count, rows

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [..., H] -> logits [T, E], weights [T, k] and experts [T, k], as transformers' routers have it."""
        if self._kernels.route is None:
            raise RuntimeError(f"the {self._kernels.name} kernels choose no experts")
        flat = hidden.reshape(-1, hidden.shape[-1])
        used = self._rows.num_rows if len(flat) == self._rows.num_padded else len(flat)
        found = self._kernels.route(flat[:used].contiguous(), self.routing, self._count)
        logits, index, weights = (F.pad(each, (0, 0, 0, len(flat) - used)) for each in found)
        return logits, weights, index


def bias_name(router: Any) -> str | None:
    """Return the name of a router's tensor that is added to scores for the choice; None without one."""
    if isinstance(getattr(router, _BIAS, None), Tensor):
        return _BIAS
    return f"moe_statics.{_BIAS}" if hasattr(getattr(router, "moe_statics", None), _BIAS) else None


@torch.no_grad()
def form_of(router: Any, config: Any, dtype: torch.dtype) -> Routing | None:
    """The router's form for rows of this type, without its numbers; None: the op has no such form."""
    weight = getattr(router, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2 or not hasattr(router, "top_k"):
        return None
    numbers = {name for name, _ in (*router.named_parameters(), *router.named_buffers())}
    if numbers - {"weight", "bias", bias_name(router)} or len(inspect.signature(router.forward).parameters) != 1:
        return None
    try:
        with torch.device("cpu"):
            copy = type(router)(config)
        added = _filled(copy, dtype)
        rows = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
        found = copy(rows)
    except Exception:  # whatever a class of its own makes of this: it stays as it is
        return None
    for form in _forms(copy, count=len(copy.weight)):
        bias = None if getattr(copy, "bias", None) is None else copy.bias.detach()
        routing = replace(form, weight=pack_linear(copy.weight.detach(), bias), selection_bias=added)
        if _agrees(found, rows, routing, len(copy.weight)):
            return form
    return None


def _filled(router: Any, dtype: torch.dtype) -> Tensor | None:
    """Give the router random numbers; those that are added to its scores."""
    random, name = torch.Generator().manual_seed(0), bias_name(router)
    count, width = router.weight.shape
    router.weight.data = (2 * torch.randn(count, width, generator=random) / width**0.5).to(dtype)
    if getattr(router, "bias", None) is not None:
        router.bias.data = torch.randn(count, generator=random).to(dtype)
    if name is None:
        return None
    holder, _, attribute = name.rpartition(".")
    values = (0.2 * torch.randn(getattr(router.get_submodule(holder), attribute).shape, generator=random)).bfloat16()
    getattr(router.get_submodule(holder), attribute).data = values.float()
    return values.float().flatten()


def _forms(router: Any, count: int) -> Iterator[Routing]:
    """The forms that the router's attributes may stand for."""
    groups = int(getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1)
    scorings: tuple[Scoring, ...] = ("sigmoid", "softmax")
    for scoring in scorings:
        for best in (2, 1) if groups > 1 else (2,):
            routing = Routing(
                weight=None,
                top_k=router.top_k,
                scoring=scoring,
                normalised=bool(getattr(router, "norm_topk_prob", True)),
                scale=float(getattr(router, "routed_scaling_factor", 1.0)),
                groups=groups,
                kept_groups=int(getattr(router, "topk_group", None) or 1) if groups > 1 else 1,
                best_of_group=best,
                least_sum=float(getattr(router, "norm_min", 0.0)),
                epsilon=_EPSILON if scoring == "sigmoid" else 0.0,
            )
            try:
                routing.check(count)
            except ValueError:
                continue
            yield routing


def _agrees(found: Any, rows: Tensor, routing: Routing, count: int) -> bool:
    """Whether what a router has given is what the op gives: logits, and the weight of every expert."""
    if not isinstance(found, tuple) or len(found) != 3 or not all(isinstance(each, Tensor) for each in found):
        return False
    logits, index, weights = route(rows, routing, count)
    if found[0].shape != logits.shape or found[1].shape != weights.shape or found[2].shape != index.shape:
        return False
    if found[2].is_floating_point() or found[1].dtype is not torch.float32:
        return False
    theirs, ours = (
        torch.zeros_like(logits).scatter(1, at.long(), values.float())
        for at, values in ((found[2], found[1]), (index, weights))
    )
    return all(
        bool(((there - here).abs() <= _TOLERANCE * here.abs().max()).all())
        for there, here in ((found[0].float(), logits), (theirs, ours))
    )

"""The two functions of ours that transformers' modules call by name: attention, and experts.

A module finds what computes it in an attribute of its own, so that two models in one process do not know each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface

from quire_engine.execution.models.fallback.model_class import OURS

_ATTRIBUTE = "quire_computes"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One layer's queries, keys and values of a step, all rows in one flat sequence: [1, heads, T, D]."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # [heads]


class Computes(Protocol):
    """The attention and the experts of a model's modules: by a probe, or by the steps of a loaded model."""

    def attend(self, call: AttentionCall) -> Tensor:
        """[1, T, heads, D] of the values."""
        ...

    def experts(self, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The experts `index` [T, k] of every row of hidden [T, H], weighted by `weights` [T, k]: [T, H]."""
        ...


def attach(model: nn.Module, computes: Computes) -> None:
    """Let the model's modules be computed by `computes` from now on."""
    for module in model.modules():
        module.__dict__[_ATTRIBUTE] = computes


def set_interfaces(model: Any) -> None:
    """Let the model call our functions. No mask is registered for them, so that the model builds none."""
    model.set_attn_implementation(OURS)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "_experts_implementation", None) != OURS:
            config._experts_implementation_internal = OURS


def is_experts(module: nn.Module) -> bool:
    """Whether the module's experts come through the interface, as stacked matrices."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))


def _attend(  # noqa: PLR0917 - transformers' signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    del attention_mask, dropout, rest
    computes: Computes = module.__dict__[_ATTRIBUTE]
    call = AttentionCall(
        module=module,
        query=query,
        key=key,
        value=value,
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return computes.attend(call), None


def _experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    computes: Computes = module.__dict__[_ATTRIBUTE]
    return computes.experts(module, hidden, index, weights)


AttentionInterface.register(OURS, _attend)
ExpertsInterface.register(OURS, _experts)

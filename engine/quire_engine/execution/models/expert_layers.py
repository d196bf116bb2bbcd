"""The ops of a layer's experts, and of the MLPs beside them, from the weights.

Promises: rows choose by numbers that are never quantised. Must not know: sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.experts import EXPERT_SCALES, OWN_NORM, SELECTION_BIAS
from quire_engine.execution.models.experts_config import ExpertsConfig
from quire_engine.execution.models.matrix_parts import Part, WeightSource
from quire_engine.execution.models.sites import site_of
from quire_kernels.kernel_set import (
    ExpertMatrices,
    GateWide,
    KernelSet,
    LayerOp,
    LinearAdd,
    LinearWeight,
    MixExperts,
    Norm,
    NormAdd,
    NormGateUp,
    NormHold,
    Routing,
    expert_rows,
)

SHARED = "shared_gate_up"  # the end of the place of the expert that every row has


class ExpertLayers:
    """Makes the ops of the layers that have experts."""

    def __init__(
        self, source: WeightSource, config: ModelConfig, kernels: KernelSet, norm: Callable[[str], Norm]
    ) -> None:
        """`norm`: makes a norm from the name of its tensor."""
        self._source, self._config, self._norm = source, config, norm
        self._pack_router, self._name = kernels.pack_router, kernels.name
        self._computes_gates = kernels.gate_rows is not None

    def ops(self, index: int, known: ExpertsConfig, norm: Norm | None, after: Norm | None) -> Iterator[LayerOp]:
        """Experts in place of an MLP, and the shared one if there is one. `after`: a norm of what they give."""
        prefix = f"model.layers.{index}."
        scale = self._config.residual_scale if after is None else 1.0
        if known.shared_inner:
            yield from self._shared(index, known, norm)
        yield self._mix(index, prefix, known, norm, to_residual=after is None)
        if known.shared_inner:  # it read x before the experts were added
            down = self._matrix(prefix + "shared_down", [Part(f"{prefix}mlp.{known.entry.shared}.down_proj")])
            yield LinearAdd(
                source="wide", weight=down, scale=scale, to="x" if after is None else "y", site=site_of(index, "down")
            )
        if after is not None:
            yield NormAdd(norm=after)

    def ops_beside(self, index: int, known: ExpertsConfig, after: Norm, scale: float) -> Iterator[LayerOp]:
        """Experts beside an MLP that has left its result as y: both are normed, and their sum is normed again."""
        prefix = f"model.layers.{index}."
        of_mlp, before, of_experts = (self._norm(f"{prefix}{name}.weight") for name in known.entry.beside_mlp or ())
        yield NormHold(norm=of_mlp)
        yield self._mix(index, prefix + "experts_", known, before, to_residual=False)
        yield NormHold(norm=of_experts, adds=True)
        yield NormAdd(norm=after, scale=scale, source="held")

    def _shared(self, index: int, known: ExpertsConfig, norm: Norm | None) -> Iterator[LayerOp]:
        """The expert that every row has, up to its last matrix."""
        prefix = f"model.layers.{index}."
        name, place = f"{prefix}mlp.{known.entry.shared}.", prefix + SHARED
        gate, up = ([Part(f"{name}{side}_proj.weight")] for side in ("gate", "up"))
        weight = self._source.gate_up(place, gate, up, [])
        site = site_of(index, "gate_up")
        yield NormGateUp(norm=norm, weight=weight, activation=self._config.activation, site=site)
        if known.entry.shared_gate is not None:
            if not self._computes_gates:
                raise ModelLoadError(f"{self._config.architecture}: the {self._name} kernels gate no rows")
            tensor = self._source.tensor(f"{prefix}mlp.{known.entry.shared_gate}.weight")
            yield GateWide(norm=norm, weight=self._router(tensor, None))

    def _mix(self, index: int, place: str, known: ExpertsConfig, norm: Norm | None, *, to_residual: bool) -> MixExperts:
        config, mlp = self._config, f"model.layers.{index}.mlp."

        def parts(name: str, rows: int) -> list[Part]:
            whole = expert_rows(rows)
            return [Part(f"{mlp}experts.{expert}.{name}", filled=whole) for expert in range(known.count)]

        routing = self._routing(mlp, known)
        gate, up = (parts(name, known.inner) for name in ("gate_proj", "up_proj"))
        biases = [part.named(".bias") for part in (*gate, *up)] if known.entry.biases else []
        gate, up = ([part.named(".weight") for part in each] for each in (gate, up))
        above = self._source.gate_up(place + "gate_up", gate, up, biases)
        down = parts("down_proj", config.hidden_size)
        below = self._matrix(place + "down", down, bias=known.entry.biases)
        experts = ExpertMatrices(
            count=known.count, inner=known.inner, gate_up=above, down=below, activation=config.activation
        )
        return MixExperts(
            norm=norm,
            routing=routing,
            experts=experts,
            scale=config.residual_scale,
            to="x" if to_residual else "y",
            site=site_of(index, "experts_gate_up"),
        )

    def _routing(self, mlp: str, known: ExpertsConfig) -> Routing:
        source, entry = self._source, known.entry
        weight = source.tensor(mlp + "gate.weight", wide=entry.wide_router)
        bias = source.tensor(mlp + "gate.bias") if entry.biases else None
        routing = Routing(
            weight=self._router(weight, bias),
            top_k=known.top_k,
            scoring=entry.scoring,
            normalised=known.normalised,
            scale=known.scale,
            selection_bias=source.tensor(mlp + SELECTION_BIAS, wide=True) if entry.selection_bias else None,
            groups=known.groups,
            kept_groups=known.kept_groups,
            least_sum=known.least_sum,
            epsilon=entry.epsilon,
        )
        if not entry.own_norm:
            return routing
        own = source.tensor(mlp + OWN_NORM, wide=True) * self._config.hidden_size**-0.5
        scales = source.tensor(mlp + EXPERT_SCALES, wide=True)
        return replace(routing, norm=Norm(own, self._config.norm_eps), expert_scales=scales)

    def _router(self, weight: Tensor, bias: Tensor | None) -> LinearWeight:
        if self._pack_router is None:
            raise ModelLoadError(f"{self._config.architecture}: the {self._name} kernels compute no experts")
        return self._pack_router(weight, bias)

    def _matrix(self, place: str, parts: list[Part], *, bias: bool = False) -> LinearWeight:
        weights, biases = ([part.named(kind) for part in parts] for kind in (".weight", ".bias"))
        return self._source.matrix(place, weights, biases if bias else [])

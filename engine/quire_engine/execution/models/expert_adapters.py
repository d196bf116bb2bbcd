"""An adapter's matrices for the experts that rows choose, as PEFT writes them.

PEFT writes A and B for each expert's matrix; or for the parameter that holds a matrix of all experts
(`target_parameters`) A [E r, K], one expert's rows behind another's, and B [N, r E], whose column j E + e is column j
of expert e. A layer's `experts.lora_*` are those of the parameter that was targeted last: down_proj, or gate_up_proj
where it is the only one; with both, gate_up_proj's are `experts.base_layer.lora_*`.
Source: `ParamWrapper` of peft.tuners.lora.layer in PEFT 0.19 to 0.21. Before, inputs and outputs changed places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.adapter_pairs import Pair, Settings, check_tensor
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.sites import site_of
from quire_kernels.low_rank import LowRankExperts, LowRankPart

_STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts(\.base_layer)?")
_FIRST_VERSION = (0, 19)  # of PEFT, whose B has a row for every output
_PARAMETERS = ("gate_up_proj", "down_proj")


def check_parameters(file: Path, settings: Settings, config: ModelConfig) -> None:
    """Raises ModelLoadError for a name that is none of the model's parameters of experts."""
    for target in settings.parameters:
        if not any(_is_meant(target, layer, name) for layer in _layers(config) for name in _PARAMETERS):
            known = ", ".join(f"mlp.experts.{name}" for name in _PARAMETERS) if config.experts else "none"
            raise ModelLoadError(
                f"{file}: target_parameters names {target[:80]!r}, which is no parameter of this model that adapters"
                f" add to; those are {known}"
            )


class ExpertStacks:
    """The tensors of a file that are of all experts of a layer."""

    def __init__(self, file: Path, config: ModelConfig, settings: Settings) -> None:
        self._file, self._config, self._settings = file, config, settings
        self._found: dict[str, dict[str, Tensor]] = {}  # A and B, by parameter

    def take(self, module: str, part: str, tensor: Tensor) -> bool:
        """Whether a tensor is one of them. `part`: A or B."""
        matched = _STACK.fullmatch(module)
        if matched is None or int(matched[1]) not in _layers(self._config):
            return False
        meant = [name for name in _PARAMETERS if self._is_target(int(matched[1]), name)]
        if not meant or (matched[2] is not None and len(meant) == 1):
            return False
        name = meant[0] if matched[2] is not None else meant[-1]
        self._found.setdefault(f"model.layers.{matched[1]}.mlp.experts.{name}", {})[part] = tensor
        return True

    def parts(self) -> dict[str, LowRankPart]:
        """Return each parameter's rows in the order of a matrix as it multiplies. Raises ModelLoadError."""
        known = self._config.experts
        if known is None:
            return {}
        found, hidden, turned = {}, self._config.hidden_size, known.entry.stored == "turned"
        for parameter, both in self._found.items():
            is_pair = parameter.endswith("gate_up_proj")
            rows, columns = (2 * known.inner, hidden) if is_pair else (hidden, known.inner)
            rank = self._settings.rank_of(parameter)
            ranks = known.count * rank
            if not turned:  # those are stored with their inputs first, as all were before
                self._check_version(parameter, both, (ranks, rows), rows == columns)
            for part, shape in (("A", (ranks, columns)), ("B", (rows, ranks))):
                check_tensor(self._file, f"{parameter}.lora_{part}", both.get(part), shape)
            expand = both["B"].view(rows, rank, known.count).permute(2, 0, 1)  # [E, N, r]
            if turned and is_pair:
                expand = torch.cat([expand[:, ::2], expand[:, 1::2]], dim=1)
            found[parameter] = LowRankPart(
                first_row=0,
                shrink=both["A"].view(known.count, rank, columns),
                expand=expand,
                scale=self._settings.scale_of(parameter),
            )
        return found

    def _check_version(self, parameter: str, both: Mapping[str, Tensor], before: tuple[int, int], same: bool) -> None:
        shape = None if "A" not in both else tuple(both["A"].shape)
        version = re.match(r"(\d+)\.(\d+)", self._settings.version)
        known = version is not None and (int(version[1]), int(version[2])) >= _FIRST_VERSION
        if shape == before and not (same and known):
            raise ModelLoadError(
                f"{self._file}: {parameter} has its inputs and outputs in the places that they had before PEFT 0.19;"
                f" peft_version is {self._settings.version[:40]!r}; save the adapter with a newer PEFT"
            )

    def _is_target(self, layer: int, name: str) -> bool:
        return any(_is_meant(target, layer, name) for target in self._settings.parameters)


def expert_matrices(
    file: Path, config: ModelConfig, pairs: Mapping[str, Pair], stacks: Mapping[str, LowRankPart]
) -> dict[int, LowRankExperts]:
    """Return matrices by site, from pairs of single experts or those of all experts together. Raises ModelLoadError."""
    found, known = {}, config.experts
    if known is None:
        return {}
    for layer in _layers(config):
        prefix = f"model.layers.{layer}.mlp.experts."
        above = [("gate_proj", 0), ("up_proj", known.inner)]
        for name, single in (("gate_up_proj", above), ("down_proj", [("down_proj", 0)])):
            parts = [stacks[prefix + name]] if prefix + name in stacks else []
            for one, row in single:
                each = [pairs.get(f"{prefix}{expert}.{one}") for expert in range(known.count)]
                part = _stacked(file, f"{prefix}*.{one}", row, each)
                if part is not None and prefix + name in stacks:
                    raise ModelLoadError(f"{file}: {prefix}{name} is adapted twice, as a whole and by expert")
                parts += [] if part is None else [part]
            if parts:
                is_pair = name == "gate_up_proj"
                site = site_of(layer, "experts_gate_up" if is_pair else "experts_down")
                found[site] = LowRankExperts(
                    count=known.count,
                    num_rows=2 * known.inner if is_pair else config.hidden_size,
                    num_inputs=config.hidden_size if is_pair else known.inner,
                    gate_up=is_pair,
                    parts=tuple(parts),
                )
    return found


def _stacked(file: Path, name: str, row: int, each: Sequence[Pair | None]) -> LowRankPart | None:
    """Single experts' pairs as one part; those that have none get zeros. None: none has one."""
    some = next((pair for pair in each if pair is not None), None)
    if some is None:
        return None
    for expert, pair in enumerate(each):
        if pair is not None and (len(pair.shrink), pair.scale) != (len(some.shrink), some.scale):
            raise ModelLoadError(
                f"{file}: {name.replace('*', str(expert))} has rank {len(pair.shrink)} and scale {pair.scale:g},"
                f" another expert {len(some.shrink)} and {some.scale:g}; experts of a layer must be alike"
            )
    shrink, expand = torch.zeros_like(some.shrink), torch.zeros_like(some.expand)
    return LowRankPart(
        first_row=row,
        shrink=torch.stack([shrink if pair is None else pair.shrink for pair in each]),
        expand=torch.stack([expand if pair is None else pair.expand for pair in each]),
        scale=some.scale,
    )


def _layers(config: ModelConfig) -> Iterator[int]:
    return (layer for layer in range(config.num_layers) if config.has_experts(layer))


def _is_meant(target: str, layer: int, name: str) -> bool:
    """Whether a name of `target_parameters`, or the end of one, is that of a layer's parameter."""
    places = (f"model.layers.{layer}.mlp.experts.{name}", f"model.layers.{layer}.experts.{name}")
    return any(place == target or place.endswith(f".{target}") for place in places)

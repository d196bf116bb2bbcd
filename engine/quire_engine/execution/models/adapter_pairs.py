"""A pair A and B of an adapter, its checks, and the settings that its numbers depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.contract.errors import ModelLoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of adapter_config.json that the adapter's numbers depend on."""

    rank: int
    alpha: float
    by_root: bool  # rank-stabilised (Kalajdzievski 2023, arXiv:2312.03732): alpha over the root of the rank
    ranks: Mapping[str, float]  # by pattern
    alphas: Mapping[str, float]
    targets: tuple[str, ...]  # names of modules; none: an expression says which, or all are
    parameters: tuple[str, ...] = ()  # names of parameters that are no modules: those of all experts together
    version: str = ""  # of PEFT, that wrote it

    def rank_of(self, module: str) -> int:
        return int(_of_pattern(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _of_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.by_root else rank)


class Pair(NamedTuple):
    shrink: Tensor  # [r, K]
    expand: Tensor  # [N, r]
    scale: float


def check_tensor(file: Path, name: str, tensor: Tensor | None, shape: tuple[int, int]) -> None:
    if tensor is None:
        raise ModelLoadError(f"{file}: {name} is missing")
    if tuple(tensor.shape) != shape:
        raise ModelLoadError(f"{file}: {name} has shape {list(tensor.shape)}, the configuration implies {list(shape)}")
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelLoadError(f"{file}: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelLoadError(f"{file}: {name} holds values that are not finite numbers")


def _of_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Return the value of the first pattern that is the module's name or an end of it, as PEFT chooses."""
    for pattern, value in patterns.items():
        whole, literal = pattern.startswith("^"), pattern.strip("^$").replace("\\.", ".")
        if module == literal or (not whole and module.endswith("." + literal)):
            return value
    return default

"""The experts of a checkpoint as GGUF files have them: one tensor for each matrix of all experts of a layer.

Promises: what a type rounds is rounded in the checkpoint too. Must not know: the loader under test.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import torch

from support.gguf_blocks import numbers, random_blocks
from support.gguf_files import Stored

Kinds = Callable[[str, tuple[int, ...]], str]
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ONE = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_ALL = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)(_bias)?")
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def is_expert(name: str) -> bool:
    return _ONE.fullmatch(name) is not None or _ALL.fullmatch(name) is not None


def store_experts(tensors: dict[str, torch.Tensor], kinds: Kinds, random: np.random.Generator) -> list[Stored]:
    """The tensors of the file; those of `tensors` become what these stand for."""
    found: list[Stored] = []
    places: dict[tuple[int, str], dict[int, str]] = {}
    for name in sorted(tensors):
        if (one := _ONE.fullmatch(name)) is not None:
            places.setdefault((int(one[1]), _PARTS[one[3]]), {})[int(one[2])] = name
        elif (whole := _ALL.fullmatch(name)) is not None:
            found += _store_turned(tensors, name, whole, kinds, random)
    for (layer, part), names in places.items():
        stack = torch.stack([tensors[names[expert]] for expert in range(len(names))])
        stored, means = _store(f"blk.{layer}.ffn_{part}_exps.weight", stack, kinds, random)
        found.append(stored)
        tensors.update({names[expert]: means[expert].clone() for expert in names})
    return found


def _store_turned(
    tensors: dict[str, torch.Tensor], name: str, match: re.Match[str], kinds: Kinds, random: np.random.Generator
) -> list[Stored]:
    """gpt-oss's: transposed, with the gate's columns and up's in turns."""
    stack, end = tensors[name], "bias" if match[3] else "weight"
    if not match[3]:
        stack = stack.transpose(1, 2)
    means = torch.empty(stack.shape)
    found: list[Stored] = []
    turns = {"down": slice(None)} if match[2] == "down_proj" else {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    for part, rows in turns.items():
        stored, means[:, rows] = _store(f"blk.{match[1]}.ffn_{part}_exps.{end}", stack[:, rows], kinds, random)
        found.append(stored)
    tensors[name] = means if match[3] else means.transpose(1, 2).contiguous()
    return found


def _store(name: str, stack: torch.Tensor, kinds: Kinds, random: np.random.Generator) -> tuple[Stored, torch.Tensor]:
    shape = tuple(stack.shape)
    kind = "F32" if name.endswith("bias") else kinds(name, shape)
    if kind in _PLAIN:
        value = stack.to(_PLAIN[kind]).contiguous()
        return Stored(name, kind, shape, value.view(torch.uint8).numpy().tobytes()), value.float()
    blocks = random_blocks(kind, shape[0] * shape[1], shape[2], random)
    return Stored(name, kind, shape, blocks.tobytes()), torch.from_numpy(numbers(kind, blocks)).view(shape)

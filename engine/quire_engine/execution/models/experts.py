"""The experts of a checkpoint's layers, by the names that published checkpoints of Qwen3-MoE have.

Promises: each expert's matrices are tensors of their own, whether they are stored so or in one tensor of all.
"""

from __future__ import annotations

import re
from functools import partial

from torch import Tensor

from quire_engine.execution.models.checkpoint import STORED, Checkpoint, Made
from quire_engine.execution.models.config import ModelConfig
from quire_kernels.kernel_set import expert_rows
from quire_kernels.packed_form import PackedForm

_STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias)?")
# Mixtral's own names, and gpt-oss's of its router.
_OTHER_NAMES = (
    (re.compile(r"(model\.layers\.\d+\.)block_sparse_moe\."), r"\1mlp."),
    (re.compile(r"(\.mlp\.experts\.\d+\.)w1\."), r"\1gate_proj."),
    (re.compile(r"(\.mlp\.experts\.\d+\.)w2\."), r"\1down_proj."),
    (re.compile(r"(\.mlp\.experts\.\d+\.)w3\."), r"\1up_proj."),
    (re.compile(r"(model\.layers\.\d+\.mlp\.)router\."), r"\1gate."),
)


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to one expert."""
    return ".mlp.experts." in name


def expert_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's router and experts; none where it has an MLP."""
    known = config.experts
    if known is None or not known.layers[layer]:
        return {}
    mlp = f"model.layers.{layer}.mlp."
    shapes: dict[str, tuple[int, ...]] = {mlp + "gate.weight": (known.count, config.hidden_size)}
    if known.biases:
        shapes[mlp + "gate.bias"] = (known.count,)
    sizes = {"gate_proj": known.inner, "up_proj": known.inner, "down_proj": config.hidden_size}
    for expert in range(known.count):
        for name, rows in sizes.items():
            columns = known.inner if name == "down_proj" else config.hidden_size
            shapes[f"{mlp}experts.{expert}.{name}.weight"] = (rows, columns)
            if known.biases:
                shapes[f"{mlp}experts.{expert}.{name}.bias"] = (rows,)
    return shapes


def most_expert_bytes(config: ModelConfig, form: PackedForm) -> int:
    """An upper bound on the packed bytes of all layers' experts."""
    known = config.experts
    if known is None:
        return 0
    pair = form.most_bytes(2 * known.count * expert_rows(known.inner), config.hidden_size)
    return sum(known.layers) * (pair + form.most_bytes(known.count * expert_rows(config.hidden_size), known.inner))


def take_experts(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Give routers and experts the names of `expert_shapes`. Raises ModelLoadError for a stack of another shape."""
    known = config.experts
    if known is None:
        return
    for old, new in _OTHER_NAMES:
        checkpoint.rename(lambda name: old.sub(new, name))  # noqa: B023
    for name in sorted(checkpoint.names):
        found = _STACK.fullmatch(name)
        if found is None:
            continue
        prefix, kind, bias = found.groups()
        pair = (2 * known.inner, config.hidden_size)
        rows, columns = pair if kind == "gate_up_proj" else (config.hidden_size, known.inner)
        turned = known.in_turns and not bias
        wanted = (
            (known.count, rows) if bias else (known.count, columns, rows) if turned else (known.count, rows, columns)
        )
        dtype, shape = checkpoint.stored_as(name)
        if shape != wanted:
            raise checkpoint.error(name, f"has shape {list(shape)}, the configuration implies {list(wanted)}")
        if dtype not in STORED:
            raise checkpoint.error(name, f"is stored as {dtype}; supported: {', '.join(STORED)}")
        made: dict[str, Made] = {}
        for expert in range(known.count):
            for part, first, step, count in _rows_of_parts(kind, rows, in_turns=known.in_turns):
                whole = f"{prefix}{expert}.{part}.{'bias' if bias else 'weight'}"
                decode = partial(_view, expert=expert, turned=turned, first=first, step=step, count=count)
                made[whole] = ((count,) if bias else (count, columns)), decode
        checkpoint.divide({"stack": name}, made)


def _rows_of_parts(kind: str, rows: int, *, in_turns: bool) -> tuple[tuple[str, int, int, int], ...]:
    """(name, first row, distance, number of rows) of each matrix that is stored in one."""
    if kind == "down_proj":
        return (("down_proj", 0, 1, rows),)
    half = rows // 2
    if in_turns:
        return ("gate_proj", 0, 2, half), ("up_proj", 1, 2, half)
    return ("gate_proj", 0, 1, half), ("up_proj", half, 1, half)


def _view(stored: dict[str, Tensor], *, expert: int, turned: bool, first: int, step: int, count: int) -> Tensor:
    one = stored["stack"][expert]
    return (one.T if turned else one)[first::step][:count]

"""The experts of a checkpoint's layers, by the names that published checkpoints of Qwen3-MoE have.

Promises: each expert's matrices are tensors of their own, whether they are stored so or in one tensor of all.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.execution.models.checkpoint import STORED, Checkpoint, Kept, Made
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.dequantising import E2M1, EXPONENT_BIAS
from quire_engine.execution.models.experts_config import ExpertsConfig
from quire_kernels.kernel_set import expert_rows
from quire_kernels.packed_form import PackedForm
from quire_kernels.stored import StoredMatrix

_STACK = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias)?")
_BLOCKS = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)_blocks")
_MX_GROUP = 32  # of MXFP4, numbers that share an exponent
# Below a layer's mlp: what is added to scores for the choice; a router's own norm; what multiplies experts' weights.
SELECTION_BIAS = "gate.e_score_correction_bias"
OWN_NORM, EXPERT_SCALES = "gate.scale", "gate.per_expert_scale"
# Mixtral's own names, gpt-oss's of its router, Gemma's of both, and Ernie's of what is added for the choice.
_OTHER_NAMES = (
    (re.compile(r"(model\.layers\.\d+\.)block_sparse_moe\."), r"\1mlp."),
    (re.compile(r"(\.mlp\.experts\.\d+\.)w1\."), r"\1gate_proj."),
    (re.compile(r"(\.mlp\.experts\.\d+\.)w2\."), r"\1down_proj."),
    (re.compile(r"(\.mlp\.experts\.\d+\.)w3\."), r"\1up_proj."),
    (re.compile(r"(model\.layers\.\d+\.mlp\.)router\.gate\."), r"\1gate."),
    (re.compile(r"(model\.layers\.\d+\.mlp\.)router\."), r"\1gate."),
    (re.compile(r"(model\.layers\.\d+\.mlp\.)expert_bias"), r"\1gate.e_score_correction_bias"),
    (re.compile(r"(model\.layers\.\d+\.)experts\."), r"\1mlp.experts."),
    (re.compile(r"(model\.layers\.\d+\.)router\.proj\."), r"\1mlp.gate."),
    (re.compile(r"(model\.layers\.\d+\.)router\."), r"\1mlp.gate."),
    (re.compile(r"(model\.layers\.\d+\.mlp\.)(?:gate\.)?moe_statics\."), r"\1gate."),
)


def common_name(name: str) -> str:
    """The name of `expert_shapes` for a tensor of a router or an expert; any other name as it is."""
    for old, new in _OTHER_NAMES:
        name = old.sub(new, name)
    return name


def is_expert(name: str) -> bool:
    """Whether a tensor belongs to one expert."""
    return ".mlp.experts." in name


def is_router(name: str) -> bool:
    """Whether a tensor is the matrix that rows choose their experts by, or gate a shared one by."""
    return name.endswith("gate.weight")


def expert_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a layer's router, experts and what stands beside them; none where it has an MLP alone."""
    known, hidden = config.experts, config.hidden_size
    if known is None or not known.layers[layer]:
        return {}
    prefix, entry = f"model.layers.{layer}.", known.entry
    mlp = prefix + "mlp."
    shapes: dict[str, tuple[int, ...]] = {mlp + "gate.weight": (known.count, hidden)}
    if entry.biases:
        shapes[mlp + "gate.bias"] = (known.count,)
    if entry.selection_bias:
        shapes[mlp + SELECTION_BIAS] = (known.count,)
    if entry.own_norm:
        shapes |= {mlp + OWN_NORM: (hidden,), mlp + EXPERT_SCALES: (known.count,)}
    shapes |= {f"{prefix}{name}.weight": (hidden,) for name in entry.beside_mlp or ()}
    if known.shared_inner:
        shapes |= _shared_shapes(known, mlp, hidden)
    sizes = {"gate_proj": known.inner, "up_proj": known.inner, "down_proj": hidden}
    for expert in range(known.count):
        for name, rows in sizes.items():
            columns = known.inner if name == "down_proj" else hidden
            shapes[f"{mlp}experts.{expert}.{name}.weight"] = (rows, columns)
            if entry.biases:
                shapes[f"{mlp}experts.{expert}.{name}.bias"] = (rows,)
    return shapes


def _shared_shapes(known: ExpertsConfig, mlp: str, hidden: int) -> dict[str, tuple[int, ...]]:
    inner, name = known.shared_inner, f"{mlp}{known.entry.shared}."
    shapes: dict[str, tuple[int, ...]] = {f"{name}{side}_proj.weight": (inner, hidden) for side in ("gate", "up")}
    shapes[name + "down_proj.weight"] = (hidden, inner)
    if known.entry.shared_gate is not None:
        shapes[f"{mlp}{known.entry.shared_gate}.weight"] = (1, hidden)
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
    checkpoint.rename(common_name)
    for name in sorted(checkpoint.names):
        if name.endswith(SELECTION_BIAS):
            _take_bias(checkpoint, name)
        if (blocks := _BLOCKS.fullmatch(name)) is not None:
            _take_blocks(checkpoint, config, known, *blocks.groups())
        found = _STACK.fullmatch(name)
        if found is None:
            continue
        prefix, kind, bias = found.groups()
        rows, columns = _sizes(config, known, kind)
        dtype, shape = checkpoint.stored_as(name)
        as_rows = (known.count, rows) if bias else (known.count, rows, columns)
        turned = known.entry.stored != "rows" and not bias
        if known.entry.stored == "columns" and shape == as_rows:
            turned = False  # as transformers has them in memory, and saves them
        wanted = (known.count, columns, rows) if turned else as_rows
        if shape != wanted:
            raise checkpoint.error(name, f"has shape {list(shape)}, the configuration implies {list(wanted)}")
        if dtype not in STORED:
            raise checkpoint.error(name, f"is stored as {dtype}; supported: {', '.join(STORED)}")
        made: dict[str, Made] = {}
        for expert in range(known.count):
            for part, first, step, count in _rows_of_parts(kind, rows, in_turns=known.entry.stored == "turned"):
                whole = f"{prefix}{expert}.{part}.{'bias' if bias else 'weight'}"
                decode = partial(_view, expert=expert, turned=turned, first=first, step=step, count=count)
                made[whole] = Made((count,) if bias else (count, columns), decode)
        checkpoint.divide({"stack": name}, made)


def _take_bias(checkpoint: Checkpoint, name: str) -> None:
    """Some store one row of a matrix."""
    _, shape = checkpoint.stored_as(name)
    if len(shape) == 2 and shape[0] == 1:
        checkpoint.divide({"row": name}, {name: Made(shape[1:], lambda stored: stored["row"][0])})


def _take_blocks(checkpoint: Checkpoint, config: ModelConfig, known: ExpertsConfig, prefix: str, kind: str) -> None:
    """Each expert's matrices of a stack in MXFP4: bytes [E, N, K / 32, 16], and exponents [E, N, K / 32]."""
    names = {role: f"{prefix}{kind}_{role}" for role in ("blocks", "scales")}
    rows, columns = _sizes(config, known, kind)
    groups = (known.count, rows, columns // _MX_GROUP)
    if names["scales"] not in checkpoint or columns % _MX_GROUP:
        raise checkpoint.error(names["blocks"], f"has no exponents for groups of {_MX_GROUP} of {columns} columns")
    for role, shape in (("blocks", (*groups, _MX_GROUP // 2)), ("scales", groups)):
        if checkpoint.stored_as(names[role]) != ("U8", shape):
            raise checkpoint.error(names[role], f"is not stored as U8 {list(shape)}, which the configuration implies")
    made: dict[str, Made] = {}
    for expert in range(known.count):
        for part, first, step, count in _rows_of_parts(kind, rows, in_turns=known.entry.stored == "turned"):
            which = _Rows(expert, first, step, count)
            kept = Kept(partial(_kept, which), "nibbles", _MX_GROUP, 16.0)
            made[f"{prefix}{expert}.{part}.weight"] = Made((count, columns), partial(_decoded, which), kept)
    checkpoint.divide(names, made)


class _Rows(NamedTuple):
    """An expert's rows in a stack: the first one, how far apart they lie, and how many there are."""

    expert: int
    first: int
    step: int
    number: int

    def of(self, stack: Tensor) -> Tensor:
        return stack[self.expert][self.first :: self.step][: self.number]


def _decoded(rows: _Rows, stored: dict[str, Tensor]) -> Tensor:
    """float32 [count, K]."""
    codes, exponents = _codes(rows, stored)
    return torch.ldexp(torch.tensor(E2M1)[codes.int()], exponents[..., None].int() - EXPONENT_BIAS).flatten(1)


def _kept(rows: _Rows, stored: dict[str, Tensor]) -> StoredMatrix:
    codes, exponents = _codes(rows, stored)
    scales = torch.ldexp(torch.ones(()), exponents.int() - EXPONENT_BIAS).bfloat16()
    if not bool(torch.isfinite(scales).all()):
        raise ValueError("has scales that are not finite numbers")
    return StoredMatrix(kind="nibbles", table=E2M1, codes=codes.flatten(1), group_size=_MX_GROUP, scales=scales)


def _codes(rows: _Rows, stored: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[count, K / 32, 32], of which a byte's lower half comes first, and exponents [count, K / 32]."""
    both, exponents = rows.of(stored["blocks"]), rows.of(stored["scales"])
    return torch.stack([both & 15, both >> 4], dim=-1).flatten(2), exponents


def _sizes(config: ModelConfig, known: ExpertsConfig, kind: str) -> tuple[int, int]:
    """Rows and columns of an expert's matrix as it multiplies; of gate_up_proj the rows of both."""
    return (2 * known.inner, config.hidden_size) if kind == "gate_up_proj" else (config.hidden_size, known.inner)


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

"""The tensors of a GGUF file by the names and in the order that transformers' checkpoints have.

Promises: what llama.cpp's converter changed is undone: its names, the order of rotated rows, norms stored as
1 + weight; blocks become numbers when they are read, or stay what they are.
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from quire_engine.execution.models.checkpoint import Checkpoint, Kept, Made
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.gguf_blocks import dequantise, stored_matrix, stored_type
from quire_engine.gguf import DECODED, PLAIN
from quire_engine.machine import usable_cores
from quire_kernels.stored import StoredMatrix

_LAYER = re.compile(r"blk\.(?P<layer>0|[1-9]\d*)\.(?P<slot>[a-z_]+)\.(?P<kind>weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SLOTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
_WHOLE = (".sinks", "_bias")  # ends of slots that are whole names
# One tensor for all experts of a layer, of rows as each one multiplies.
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_OF_A_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.")
_SHARED_GATE = "ffn_gate_inp_shexp"  # one row, which may be stored as such
# What the configuration was derived from already.
_DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def take_gguf(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Know the tensors by the names of transformers, as numbers and as they are stored.

    Raises ModelLoadError for types that are not read. Names that no family has stay as they are: the check of all names
    against the configuration refuses them.
    """
    # Layers that guess further tokens lie behind those of the model.
    more = range(config.num_layers, config.num_layers + config.more_layers)
    checkpoint.drop(lambda name: (match := _OF_A_LAYER.match(name)) is not None and int(match[1]) in more)
    checkpoint.drop(lambda name: name in _DERIVED)
    slots = _slots(config)
    for stored in sorted(checkpoint.names):
        kind, shape = checkpoint.stored_as(stored)
        if kind not in DECODED and kind not in PLAIN:
            raise checkpoint.error(stored, f"is stored as {kind}, which is not read")
        if config.experts is not None and _divide_experts(checkpoint, stored, kind, shape, config.experts.count):
            continue
        name = _name(stored, slots)
        if _SHARED_GATE in stored and kind in PLAIN and len(shape) == 1:
            checkpoint.decode(name, {"row": stored}, (1, *shape), lambda parts: parts["row"].unsqueeze(0))
            continue
        order = _stored_rows(name, shape, config)
        is_norm = config.family.norm_form == "offset" and name.endswith("norm.weight")
        if kind in DECODED or order is not None or is_norm:
            decode = partial(_read, kind, shape, order, is_norm)
            checkpoint.decode(name, {"rows": stored}, shape, decode, _kept(kind, shape, order))
    checkpoint.rename(lambda name: _name(name, slots))


def _slots(config: ModelConfig) -> dict[str, str]:
    """Names within a layer: those of norms and of fused matrices are the family's."""
    norms = config.family.norms
    places = {
        "attn_norm": norms.attention,
        "post_attention_norm": norms.after_attention or norms.mlp,
        "ffn_norm": norms.mlp,
        "post_ffw_norm": norms.after_mlp,
    }
    found = _SLOTS | {slot: name for slot, name in places.items() if name is not None}
    if "gate_up" in config.family.fused:
        found["ffn_up"] = "mlp.gate_up_proj"
    if config.experts is not None and config.experts.shared_inner:
        entry = config.experts.entry
        found |= {f"ffn_{each}_shexp": f"mlp.{entry.shared}.{each}_proj" for each in ("gate", "up", "down")}
        if entry.shared_gate is not None:
            found[_SHARED_GATE] = f"mlp.{entry.shared_gate}"
    return found


def _name(stored: str, slots: dict[str, str]) -> str:
    match = _LAYER.fullmatch(stored)
    if match is None or match["slot"] not in slots:
        return _TOP.get(stored, stored)
    slot = slots[match["slot"]]
    return f"model.layers.{match['layer']}.{slot}" + ("" if slot.endswith(_WHOLE) else f".{match['kind']}")


def _divide_experts(checkpoint: Checkpoint, stored: str, kind: str, shape: tuple[int, ...], count: int) -> bool:
    """Know each expert's part of a tensor of all by a name of its own; whether it is such a tensor."""
    match = _LAYER.fullmatch(stored)
    if match is None or match["slot"] not in _EXPERTS:
        return False
    if len(shape) != (3 if match["kind"] == "weight" else 2) or shape[0] != count:
        raise checkpoint.error(stored, f"has shape {list(shape)}, which is not that of {count} experts")
    prefix = f"model.layers.{match['layer']}.mlp.experts."
    into: dict[str, Made] = {
        f"{prefix}{expert}.{_EXPERTS[match['slot']]}.{match['kind']}": Made(
            shape[1:],
            partial(_read_expert, kind, shape, expert),
            _kept(kind, shape[1:], torch.arange(expert * shape[1], (expert + 1) * shape[1])),
        )
        for expert in range(count)
    }
    checkpoint.divide({"rows": stored}, into)
    return True


def _read_expert(kind: str, shape: tuple[int, ...], expert: int, parts: dict[str, Tensor]) -> Tensor:
    rows = parts["rows"]
    if kind not in DECODED:
        return rows[expert]
    return dequantise(kind, rows[expert * shape[1] : (expert + 1) * shape[1]], usable_cores())


def _stored_rows(name: str, shape: tuple[int, ...], config: ModelConfig) -> Tensor | None:
    """[N]: the stored place of each row of queries or keys whose rotated pairs lie side by side; None: they do not.

    Row i of the first half of a head is stored at 2 i, row i of the second half behind it.
    """
    if config.quantisation is None or not config.quantisation.interleaved:
        return None
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.rpartition(".")[0].rpartition(".")[2])
    width = config.head_dim
    if heads is None or shape[0] != heads * width:  # of another shape: for the check of shapes
        return None
    return torch.arange(heads * width).view(heads, width // 2, 2).transpose(1, 2).flatten()


def _kept(kind: str, shape: tuple[int, ...], order: Tensor | None) -> Kept | None:
    """How a matrix stays as it is stored; None: it is of plain numbers."""
    if kind not in DECODED or len(shape) != 2:
        return None

    def read(parts: dict[str, Tensor]) -> StoredMatrix:
        return stored_matrix(kind, parts["rows"] if order is None else parts["rows"][order], usable_cores())

    return Kept(read, *stored_type(kind))


def _read(kind: str, shape: tuple[int, ...], order: Tensor | None, is_norm: bool, parts: dict[str, Tensor]) -> Tensor:
    """Plain numbers as they are, others as float32. Whole rows are moved, before they are decoded."""
    rows = parts["rows"]
    if order is not None:
        rows = rows[order]
    if kind in DECODED:
        return dequantise(kind, rows, usable_cores()).view(shape)
    return rows.float() - 1.0 if is_norm else rows

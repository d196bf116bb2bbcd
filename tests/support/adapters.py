"""Random LoRA adapters for a checkpoint, as PEFT writes them, and the checkpoint with one of them merged.

Promises: the same files for the same arguments, and merged weights in the checkpoint's own type. Must not know: the
modules under test.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"),
    *("w1", "w2", "w3"),  # of Mixtral's experts: gate, down and up
)
# Without the gate that some attention has.
_MODULE = re.compile(
    r"(model\.layers\.(\d+)\.(?:self_attn\.(?!gate_)|mlp\.|mlp\.shared_experts?\.|(?:mlp|block_sparse_moe)\.experts\.\d+\.)"
    r"(\w+_proj|w[123]))\.weight"
)

_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.lora_([AB])\.weight")


def modules_of(model: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices of a checkpoint in one file that adapters add to, by name."""
    found = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        matched = _MODULE.fullmatch(name)
        if matched is not None and matched[3] in TARGETS:
            found[matched[1]] = tuple(tensor.shape)
    return found


def write_adapter(
    path: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Collection[str] = TARGETS,
    layers: Collection[int] | None = None,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    prefix: str = "base_model.model.",
    **config: Any,
) -> Path:
    """`ranks`: those of modules by their last names, in `rank_pattern`. `config`: further keys of the configuration."""
    generator = torch.Generator().manual_seed(1000 + seed)
    tensors, used = {}, []
    for module, (rows, columns) in sorted(modules_of(model).items()):
        leaf, layer = module.rpartition(".")[2], int(module.split(".")[2])
        if leaf not in targets or (layers is not None and layer not in layers):
            continue
        own = (ranks or {}).get(leaf, rank)
        used.append(leaf)
        shrink = torch.randn(own, columns, generator=generator) / math.sqrt(columns)
        expand = torch.randn(rows, own, generator=generator) / math.sqrt(own)
        tensors[f"{prefix}{module}.lora_A.weight"] = shrink.to(dtype)
        tensors[f"{prefix}{module}.lora_B.weight"] = expand.to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    plain = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(dict.fromkeys(used)),
        "rank_pattern": dict(ranks or {}),
        **config,
    }
    (path / "adapter_config.json").write_text(json.dumps(plain))
    return path


def merged(path: Path, model: Path, adapter: Path) -> Path:
    """The checkpoint with W + scale * B A in place of each W."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    stored = load_file(adapter / "adapter_model.safetensors")
    shutil.copytree(model, path)
    weights = load_file(model / "model.safetensors")
    for module in modules_of(model):
        shrink = next((t for name, t in stored.items() if name.endswith(f"{module}.lora_A.weight")), None)
        if shrink is None:
            continue
        expand = next(t for name, t in stored.items() if name.endswith(f"{module}.lora_B.weight"))
        leaf, rank = module.rpartition(".")[2], len(shrink)
        alpha = config.get("alpha_pattern", {}).get(leaf, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        weight = weights[f"{module}.weight"]
        weights[f"{module}.weight"] = (weight.double() + scale * expand.double() @ shrink.double()).to(weight.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def fused(path: Path, adapter: Path) -> Path:
    """An adapter whose experts each have their pair, with pairs for all experts of a layer in their place.

    Gate and up share A of twice the rank, of which each uses one half.
    """
    config = json.loads((adapter / "adapter_config.json").read_text())
    stored, rank = load_file(adapter / "adapter_model.safetensors"), config["r"]
    groups: dict[str, dict[tuple[int, str, str], torch.Tensor]] = {}
    tensors = {}
    for name, tensor in stored.items():
        matched = _OF_EXPERT.fullmatch(name)
        if matched is None:
            tensors[name] = tensor
        else:
            leaf = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(matched[3], matched[3])
            place = matched[1].replace("block_sparse_moe", "mlp")
            groups.setdefault(place, {})[int(matched[2]), leaf, matched[4]] = tensor
    for place, found in groups.items():
        count = 1 + max(expert for expert, _, _ in found)
        gates, ups, downs = (
            [(found[expert, leaf, "A"], found[expert, leaf, "B"]) for expert in range(count)]
            for leaf in ("gate_proj", "up_proj", "down_proj")
        )
        both = zip(gates, ups, strict=True)
        pairs = [(torch.cat([gate[0], up[0]]), torch.block_diag(gate[1], up[1])) for gate, up in both]
        for prefix, each in ((f"{place}.base_layer", pairs), (place, downs)):
            tensors[f"{prefix}.lora_A.weight"] = torch.cat([shrink for shrink, _ in each])
            # Column j E + e is column j of expert e.
            tensors[f"{prefix}.lora_B.weight"] = torch.stack([expand for _, expand in each], dim=-1).flatten(1)
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    config |= {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"gate_up_proj": 2 * rank},
        "alpha_pattern": {"gate_up_proj": 2 * config["lora_alpha"]},
        "peft_version": "0.21.2",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path

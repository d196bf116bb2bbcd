"""Checkpoints as GGUF files, as llama.cpp's converter makes them, and the same numbers as safetensors of float32.

Promises: names are those of the `gguf` library's table, moved rows and shifted norms as its converter's source has it.
Must not know: the loader under test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from support.checkpoints import make_checkpoint
from support.gguf_blocks import numbers, random_blocks
from support.gguf_experts import is_expert, store_experts
from support.gguf_files import Stored, Typed, write_gguf, write_shards

# The library's names of the families' architectures, as general.architecture has them.
ARCHITECTURES = {
    **{"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2"},
    **{"gemma3": "gemma3", "phi3": "phi3", "granite": "granite", "smollm3": "smollm3", "olmo2": "olmo2"},
    **{"olmo3": "olmo2", "glm4": "glm4", "seed_oss": "seed_oss", "ernie4_5": "ernie4_5", "cohere": "command-r"},
    **{"cohere2": "cohere2", "exaone4": "exaone4", "qwen3_moe": "qwen3moe", "mixtral": "llama"},
    **{"olmoe": "olmoe", "gpt_oss": "gpt-oss", "qwen2_moe": "qwen2moe"},
    **{"glm4_moe": "glm4moe", "dots1": "dots1", "ernie4_5_moe": "ernie4_5-moe"},
}
_PERMUTED = {"llama", "mistral", "granite", "smollm3", "mixtral"}
_SHIFTED = {"gemma2", "gemma3"}
_EXPERTS = {"qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"}
# Keys of the families whose first layers have no experts, by the options that the converter reads.
_BEHIND = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_BETWEEN = {
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "moe_num_shared_experts",
    "leading_dense_block_count": "moe_layer_start_index",
    "interleave_moe_layer_step": "moe_layer_interval",
}
_OF_LAYERS = {"glm4_moe": _BEHIND, "dots1": _BEHIND, "ernie4_5_moe": _BETWEEN}
Kinds = Callable[[str, tuple[int, ...]], str]
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def all_of(kind: str) -> Kinds:
    """Matrices of one type, as far as their rows are whole blocks, and plain numbers for the rest."""
    return lambda _, shape: kind if len(shape) > 1 else "F32"


PLAIN = all_of("F32")


def make_gguf(
    folder: Path,
    family: str = "qwen3",
    *,
    kinds: Kinds = PLAIN,
    change: Mapping[str, Any] | None = None,
    shards: int = 1,
    seed: int = 0,
    **overrides: Any,
) -> tuple[Path, Path]:
    """A file, and a checkpoint of what it stands for. `change`: metadata that are added or, where None, left out."""
    dense = make_checkpoint(folder / "dense", family, seed=seed, **overrides)
    return convert(dense, folder / f"{family}.gguf", family, kinds=kinds, change=change, shards=shards), dense


def convert(
    dense: Path,
    path: Path,
    family: str,
    *,
    kinds: Kinds = PLAIN,
    change: Mapping[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    """A checkpoint as a GGUF file; where a type rounds, the checkpoint's numbers become those of the file."""
    config = json.loads((dense / "config.json").read_text())
    tensors = load_file(str(dense / "model.safetensors"))
    if config.get("tie_word_embeddings") or (family in _SHIFTED and "lm_head.weight" not in tensors):
        tensors.pop("lm_head.weight", None)
    random = np.random.default_rng(17)
    stored = store_experts(tensors, kinds, random)
    for name, tensor in tensors.items():
        if is_expert(name):
            continue
        array, tensors[name] = _store(name, tensor, family, config, kinds, random)
        stored.append(array)
    stored += _factors(config)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(dense / "model.safetensors"))
    metadata = {**metadata_of(config, family), **tokenizer_metadata(dense), **(change or {})}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    if shards == 1:
        return write_gguf(path, metadata, stored)
    parts = [stored[place::shards] for place in range(shards)]
    return write_shards(path.parent, path.stem, metadata, parts)


def permute(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """As llama.cpp's convert_hf_to_gguf.py moves rows, LlamaModel.permute."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _store(  # noqa: PLR0917 - what a tensor depends on
    name: str, tensor: torch.Tensor, family: str, config: Mapping[str, Any], kinds: Kinds, random: np.random.Generator
) -> tuple[Stored, torch.Tensor]:
    """A tensor as it lies in the file, and what it stands for."""
    layers = config["num_hidden_layers"]
    arch = next(each for each, text in gguf.MODEL_ARCH_NAMES.items() if text == ARCHITECTURES[family])
    new = gguf.get_tensor_name_map(arch, layers).get_name(name, try_suffixes=(".weight", ".bias"))
    if name.endswith("e_score_correction_bias"):
        new = f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    elif name.endswith(".sinks"):
        new = f"blk.{name.split('.')[2]}.attn_sinks.weight"
    assert new is not None, name
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    order: NDArray[Any] = np.arange(tensor.shape[0])
    if family in _PERMUTED and heads is not None:
        order = permute(order, config[heads])
    kind = kinds(new, tuple(tensor.shape))
    if kind in _PLAIN:
        value = tensor.float()[torch.from_numpy(order)]
        shift = 1.0 if family in _SHIFTED and name.endswith("norm.weight") else 0.0
        value = (value + shift).to(_PLAIN[kind])
        data = value.contiguous().view(torch.uint8).numpy().tobytes()
        means = torch.empty(tuple(tensor.shape))
        means[torch.from_numpy(order)] = value.float() - shift
        return Stored(new, kind, tuple(tensor.squeeze().shape), data), means  # as the converter has it
    blocks = random_blocks(kind, tensor.shape[0], tensor.shape[1], random)
    means = torch.empty(tuple(tensor.shape))
    means[torch.from_numpy(order)] = torch.from_numpy(numbers(kind, blocks))
    return Stored(new, kind, tuple(tensor.shape), blocks.tobytes()), means


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found.get("full_attention", found)


def _factors(config: Mapping[str, Any]) -> list[Stored]:
    """Divisors of frequencies, of Llama 3's stretched rotations and of LongRoPE."""
    rope = _rope_of(config)

    def row(name: str, values: list[float]) -> Stored:
        return Stored(name, "F32", (len(values),), np.asarray(values, np.float32).tobytes())

    if rope.get("rope_type") == "longrope":
        return [row(f"rope_factors_{each}.weight", rope[f"{each}_factor"]) for each in ("long", "short")]
    if rope.get("rope_type") != "llama3":
        return []
    width = _head_dim(config)
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    values = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            values.append(1)
        elif wavelength > original / low:
            values.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            values.append(float(1 / ((1 - smooth) / factor + smooth)))
    return [row("rope_freqs.weight", values)]


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def metadata_of(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """What the converter writes of a configuration."""
    arch, rope, width = ARCHITECTURES[family], _rope_of(config), _head_dim(config)
    theta = rope.get("rope_theta") or config.get("rope_theta")
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    found: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": width,
        "attention.value_length": width,
        "rope.dimension_count": int(width * share),
        "vocab_size": config["vocab_size"],
    }
    if theta:
        found["rope.freq_base"] = float(theta)
    if family in {"cohere", "cohere2"}:
        found |= {"attention.layer_norm_epsilon": config["layer_norm_eps"], "logit_scale": config["logit_scale"]}
    else:
        found["attention.layer_norm_rms_epsilon"] = config["rms_norm_eps"]
    if config.get("sliding_window") and family not in {"qwen2", "qwen3", "smollm3", "dots1"}:
        found["attention.sliding_window"] = config["sliding_window"]
        types = config.get("layer_types")
        if types and len(set(types)) > 1:
            found["attention.sliding_window_pattern"] = Typed("bool", [kind == "sliding_attention" for kind in types])
    if rope.get("rope_type") in {"linear", "yarn"}:
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original and rope.get("rope_type") in {"yarn", "longrope"}:
        found["rope.scaling.original_context_length"] = original
    if rope.get("rope_type") == "longrope" and original:
        scale = config["max_position_embeddings"] / original
        found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    found |= _experts(config, family)
    scales = {
        "granite": {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        "gemma2": {each: each for each in ("attn_logit_softcapping", "final_logit_softcapping")},
    }
    found |= {key: float(config[name]) for key, name in scales.get(family, {}).items()}
    about = {"general.architecture": arch, "general.type": "model", "general.name": "tiny", "general.file_type": 15}
    return {**about, **{f"{arch}.{key}": value for key, value in found.items()}}


def _experts(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    found: dict[str, Any] = {key: config[name] for key, name in _OF_LAYERS.get(family, {}).items()}
    if family in _EXPERTS:
        count = config.get("num_local_experts") or config["num_experts"]
        found |= {"expert_count": count, "expert_used_count": config["num_experts_per_tok"]}
    if "shared_expert_intermediate_size" in config:
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if family in {"qwen2_moe", "qwen3_moe", "gpt_oss"}:
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        found["expert_feed_forward_length"] = inner
    if family in {"glm4_moe", "dots1"}:
        found |= {"expert_gating_func": 2, "expert_weights_scale": float(config["routed_scaling_factor"])}
    if family == "ernie4_5_moe":  # the converter's own quotient, which is right for the models that there are
        found["expert_shared_feed_forward_length"] = config["intermediate_size"] // config["num_key_value_heads"]
    return found


def tokenizer_metadata(folder: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """What the converter writes of a tokenizer of byte-level BPE."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {token["content"]: token for token in whole["added_tokens"]}
    ids = dict(whole["model"]["vocab"]) | {token["content"]: token["id"] for token in added.values()}
    tokens = sorted(ids, key=lambda token: ids[token])
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    merges = [each if isinstance(each, str) else " ".join(each) for each in whole["model"]["merges"]]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            1 if token not in added else 3 if added[token]["special"] else 4 for token in tokens
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": config["chat_template"],
    }
    for key, name in (("eos_token_id", "eos_token"), ("bos_token_id", "bos_token"), ("padding_token_id", "pad_token")):
        if config.get(name) is not None:
            found[f"tokenizer.ggml.{key}"] = ids[config[name]]
    return found

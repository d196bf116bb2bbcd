"""The metadata of a GGUF file as the config.json of the model that it was converted from.

Promises: every key of the architecture is read or known to be harmless; any other is refused by name. Must not know:
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.contract.errors import ModelLoadError
from quire_engine.gguf import DECODED, PLAIN, Gguf, shown

Config = dict[str, object]
# Keys that say nothing about the numbers: where a model comes from, of training, of other programs.
_HARMLESS = frozenset(
    [
        "rope.scaling.finetuned",
        "tensor_data_layout",
    ]
)
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ROPE_FREQUENCIES = "rope_freqs.weight"
_LAST_TOKEN = 3  # a pooling type: the vector of the last token, which is what decoders give
# The values with which Llama 3's rotations were stretched wherever they were; files hold only what came of them.
_LLAMA3_ORIGINAL, _LLAMA3_LOW, _LLAMA3_HIGH = 8192, 1.0, 4.0
_LOCAL_THETA = 10000.0  # of Gemma 3's windowed layers
_BY_SOFTMAX, _BY_SIGMOID = 1, 2  # of llama.cpp's gating functions
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Layers of the models whose queries are scaled by the width of a share of the hidden state, and not of a head.
_SCALED_BY_SHARE = {"gemma2": 46, "gemma3": 62}


class _Reader:
    """The keys of one architecture."""

    def __init__(self, model: Gguf, prefix: str) -> None:
        self.model, self.metadata = model, model.metadata
        self.prefix = prefix + "."

    def has(self, key: str) -> bool:
        return self.metadata.has(self.prefix + key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; of a list with one for each layer, the one that all have."""
        name = self.prefix + key
        value = self.metadata.raw(name)
        if isinstance(value, list):
            found = set(self.metadata.integers(name) or [])
            if len(found) != 1:
                raise self.metadata.error(f"{name} differs from layer to layer, which is not supported")
            value = found.pop()
            if value < least:
                raise self.metadata.error(f"{name} must be at least {least}, not {value}")
            return value
        return self.metadata.integer(name, default, least=least)

    def number(self, key: str, default: float | None = None) -> float:
        return self.metadata.number(self.prefix + key, default)

    def boolean(self, key: str, default: bool) -> bool:
        return self.metadata.boolean(self.prefix + key, default)

    def text(self, key: str, default: str) -> str:
        return self.metadata.text(self.prefix + key, default)

    def only(self, key: str, *taken: object) -> None:
        """Refuse other values of a key that may be absent."""
        value = self.metadata.raw(self.prefix + key)
        if value is not None and value not in taken:
            raise self.metadata.error(f"{self.prefix}{key}={shown(value)} is not supported")

    def optional(self, key: str, name: str) -> Config:
        """A number under another name, if it is there and not 0."""
        value = self.number(key, 0.0)
        return {name: value} if value else {}

    def has_tensor(self, name: str) -> bool:
        return name in self.model.tensors


def config_of(model: Gguf) -> Config:
    """The configuration. Raises ModelLoadError, naming file and key."""
    metadata = model.metadata
    if metadata.text("general.type", "model") != "model":
        raise metadata.error(f"general.type={metadata.text('general.type')!r}: not a model that answers by itself")
    name = metadata.text("general.architecture")
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        raise metadata.error(
            f"general.architecture={shown(name)} is not read from GGUF files; those are {', '.join(_ARCHITECTURES)};"
            " use the model's safetensors"
        )
    reader = _Reader(model, name)
    embedding = model.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise metadata.error(f"there is no matrix {_EMBEDDING}")
    config = {"architectures": [architecture.name], **_common(reader), **_rope(reader), **architecture.own(reader)}
    config["vocab_size"] = embedding.shape[0]
    if reader.integer("vocab_size", embedding.shape[0]) > embedding.shape[0]:
        raise metadata.error(f"{name}.vocab_size is more than the {embedding.shape[0]} rows of {_EMBEDDING}")
    config["tie_word_embeddings"] = _HEAD not in model.tensors
    config["torch_dtype"] = _dtype(model)
    types = sorted({tensor.kind.name for tensor in model.tensors.values() if len(tensor.shape) > 1})
    config["quantization_config"] = {
        "quant_method": "gguf",
        "types": ", ".join(types),
        "main_type": model.main_type,
        "interleaved": architecture.interleaved,
    }
    unknown = [key for key in metadata.unread(f"{name}.") if key.removeprefix(f"{name}.") not in _HARMLESS]
    if unknown:
        told = ", ".join(f"{key}={shown(metadata.raw(key))}" for key in unknown)
        raise metadata.error(f"{told}: not known of {name}, so the numbers might be others")
    return config


def check_types(model: Gguf) -> None:
    """Raises ModelLoadError for a tensor of a type that is not read."""
    for tensor in model.tensors.values():
        kind = tensor.kind.name
        if kind in DECODED or kind in PLAIN:
            continue
        raise ModelLoadError(
            f"{tensor.file}: tensor {shown(tensor.name)} is stored as {kind}, which is not read; use a file of the"
            f" model in {_instead(kind)}"
        )


def _instead(kind: str) -> str:
    if kind.startswith(("IQ1", "IQ2", "TQ", "Q1")):
        return "Q2_K or Q3_K_M"
    if kind.startswith("IQ3"):
        return "Q3_K_M or IQ4_XS"
    return "Q4_K_M, Q8_0 or BF16"


def _common(reader: _Reader) -> Config:
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    head_dim = reader.integer("attention.key_length", hidden // heads)
    if reader.integer("attention.value_length", head_dim) != head_dim:
        raise reader.metadata.error(f"{reader.prefix}attention.value_length differs from that of keys")
    if reader.integer("expert_count", 0, least=0) and reader.prefix not in _WITH_EXPERTS:
        raise reader.metadata.error(f"{reader.prefix}expert_count: experts of this architecture are not read")
    reader.only("attention.causal", True)
    reader.only("pooling_type", 0, _LAST_TOKEN)
    config: Config = {
        "max_position_embeddings": reader.integer("context_length"),
        "hidden_size": hidden,
        "num_hidden_layers": reader.integer("block_count"),
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }
    if reader.has("attention.layer_norm_rms_epsilon"):
        config["rms_norm_eps"] = reader.number("attention.layer_norm_rms_epsilon")
    rotated = reader.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    return config


def _rope(reader: _Reader) -> Config:
    """How positions rotate queries and keys."""
    config: Config = {"rope_theta": reader.number("rope.freq_base", 10000.0)}
    kind = reader.text("rope.scaling.type", "none")
    reader.only("rope.scale_linear", 1.0)
    factor, amplitude = reader.number("rope.scaling.factor", 1.0), reader.number("rope.scaling.attn_factor", 1.0)
    original = reader.integer("rope.scaling.original_context_length", 0, least=0)
    slopes = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
    reader.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    reader.only("rope.scaling.yarn_attn_factor", 1.0)
    reader.only("rope.scaling.yarn_log_multiplier", 0.0)
    scaled = {name: value for name, key in slopes.items() if (value := reader.number(key, 0.0))}
    if reader.has_tensor("rope_factors_long.weight"):
        return config | _longrope(reader, original, amplitude)
    if reader.has_tensor(_ROPE_FREQUENCIES):
        return config | {"rope_scaling": _frequencies(reader)}
    if kind == "linear" and factor != 1:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        if amplitude != 1 and not math.isclose(amplitude, 0.1 * math.log(max(factor, 1.0)) + 1, rel_tol=1e-4):
            raise reader.metadata.error(f"{reader.prefix}rope.scaling.attn_factor={amplitude} is not supported")
        found: Config = {"rope_type": "yarn", "factor": factor, **scaled}
        if original:
            found["original_max_position_embeddings"] = original
        config["rope_scaling"] = found
    elif kind not in {"none", "linear"}:
        raise reader.metadata.error(f"{reader.prefix}rope.scaling.type={shown(kind)} is not supported")
    return config


def _frequencies(reader: _Reader) -> Config:
    """Divisors of each frequency: Llama 3's, where they are, else as they are."""
    stored = reader.model.floats(_ROPE_FREQUENCIES)
    theta = reader.number("rope.freq_base", 10000.0)
    factor = max(stored)
    usual = _llama3(theta, len(stored), factor)
    if factor > 1 and all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(stored, usual, strict=True)):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW,
            "high_freq_factor": _LLAMA3_HIGH,
            "original_max_position_embeddings": _LLAMA3_ORIGINAL,
        }
    return {"rope_type": "longrope", "short_factor": stored, "long_factor": stored, "attention_factor": 1.0}


def _llama3(theta: float, count: int, factor: float) -> list[float]:
    """The divisors that llama.cpp's converter computes for Llama 3's rotations."""
    found = []
    for place in range(count):
        wavelength = 2 * math.pi * theta ** (place / count)
        if wavelength < _LLAMA3_ORIGINAL / _LLAMA3_HIGH:
            divisor = 1.0
        elif wavelength > _LLAMA3_ORIGINAL / _LLAMA3_LOW:
            divisor = factor
        else:
            smooth = (_LLAMA3_ORIGINAL / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
            divisor = 1 / ((1 - smooth) / factor + smooth)
        found.append(divisor)
    return found


def _longrope(reader: _Reader, original: int, amplitude: float) -> Config:
    longest = reader.integer("context_length")
    original = original or longest
    scaling: Config = {
        "rope_type": "longrope",
        "long_factor": reader.model.floats("rope_factors_long.weight"),
        "short_factor": reader.model.floats("rope_factors_short.weight"),
    }
    factor = longest / original
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if reader.has("rope.scaling.attn_factor") and not math.isclose(amplitude, usual, rel_tol=1e-6):
        scaling["attention_factor"] = amplitude
    return {"original_max_position_embeddings": original, "rope_scaling": scaling}


def _dtype(model: Gguf) -> str:
    """The type to compute in: that of the numbers where nothing is quantised."""
    kinds = {tensor.kind.name for tensor in model.tensors.values() if len(tensor.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds == {"F16"} else "bfloat16"


def _biases(reader: _Reader) -> Config:
    return {
        "attention_bias": reader.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": reader.has_tensor("blk.0.ffn_up.bias"),
    }


def _attention_bias(reader: _Reader) -> Config:
    return {"attention_bias": reader.has_tensor("blk.0.attn_q.bias")}


def _layer_types(reader: _Reader, each: int) -> Config:
    """The window and the layers that have it: all but each nth, or those that the file lists."""
    window = reader.integer("attention.sliding_window", 0, least=0)
    if not window:
        return {"sliding_window": None}
    key = f"{reader.prefix}attention.sliding_window_pattern"
    count, listed = reader.integer("block_count"), reader.metadata.raw(key)
    if isinstance(listed, list):
        if len(listed) != count or any(value not in {0, 1} for value in listed):
            raise reader.metadata.error(f"{key} must have a truth value for each of {count} layers")
        types = [_SLIDING if value else _FULL for value in listed]
    else:
        each = reader.integer("attention.sliding_window_pattern", each)
        types = [_FULL if (layer + 1) % each == 0 else _SLIDING for layer in range(count)]
    return {"sliding_window": window, "layer_types": types}


def _experts(reader: _Reader) -> Config:
    """Experts of every layer, whose logits a softmax makes into scores."""
    reader.only("expert_gating_func", 0, _BY_SOFTMAX)
    reader.only("expert_weights_scale", 0.0, 1.0)
    reader.only("expert_shared_count", 0)
    reader.only("leading_dense_block_count", 0)
    return {"num_experts_per_tok": reader.integer("expert_used_count")}


def _experts_by_sigmoid(reader: _Reader) -> Config:
    """Experts of the layers behind the first ones, as DeepSeek V3 chooses them: a sigmoid makes logits into scores."""
    reader.only("expert_gating_func", 0, _BY_SIGMOID)
    reader.only("expert_shared_feed_forward_length", 0)
    return {
        **_attention_bias(reader),
        "n_routed_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "n_shared_experts": reader.integer("expert_shared_count", 0, least=0),
        "first_k_dense_replace": reader.integer("leading_dense_block_count", 0, least=0),
        "routed_scaling_factor": reader.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": reader.boolean("expert_weights_norm", False),
        "n_group": reader.integer("expert_group_count", 0, least=0) or 1,
        "topk_group": reader.integer("expert_group_used_count", 0, least=0) or 1,
    }


def _glm4moe(reader: _Reader) -> Config:
    """The layers behind the last ones guess further tokens and are left out."""
    more, head_dim = reader.integer("nextn_predict_layers", 0, least=0), reader.integer("attention.key_length")
    layers = reader.integer("block_count") - more
    if layers < 1:
        raise reader.metadata.error(f"{reader.prefix}nextn_predict_layers={more} are all the layers that there are")
    return {
        **_experts_by_sigmoid(reader),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": more,
        "partial_rotary_factor": reader.integer("rope.dimension_count", head_dim // 2) / head_dim,
        "use_qk_norm": reader.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _dots1(reader: _Reader) -> Config:
    return {**_experts_by_sigmoid(reader), "sliding_window": None}


def _ernie4_5_moe(reader: _Reader) -> Config:
    reader.only("expert_gating_func", 0, _BY_SOFTMAX)
    reader.only("expert_weights_scale", 0.0, 1.0)
    inner, shared = reader.integer("expert_feed_forward_length"), reader.integer("expert_shared_count", 0, least=0)
    width = reader.integer("expert_shared_feed_forward_length", inner * shared, least=0)
    if width != inner * shared:
        raise reader.metadata.error(
            f"{reader.prefix}expert_shared_feed_forward_length={width} is not that of {shared} experts of {inner}"
        )
    return {
        "moe_num_experts": reader.integer("expert_count"),
        "moe_k": reader.integer("expert_used_count"),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": reader.integer("leading_dense_block_count", 0, least=0),
        "moe_layer_interval": reader.integer("interleave_moe_layer_step", 1),
    }


def _qwen3moe(reader: _Reader) -> Config:
    reader.only("expert_weights_norm", True)
    return {
        **_experts(reader),
        **_attention_bias(reader),
        "num_experts": reader.integer("expert_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen2moe(reader: _Reader) -> Config:
    reader.only("expert_weights_norm", False)
    return {
        **_experts(reader),
        "qkv_bias": reader.has_tensor("blk.0.attn_q.bias"),
        "num_experts": reader.integer("expert_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": reader.integer("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
    }


def _olmoe(reader: _Reader) -> Config:
    reader.only("expert_weights_norm", False)
    reader.only("attention.clamp_kqv", 0.0)
    return {
        **_experts(reader),
        **_attention_bias(reader),
        "num_experts": reader.integer("expert_count"),
        "intermediate_size": _inner_of_experts(reader),
        "norm_topk_prob": False,
    }


def _gpt_oss(reader: _Reader) -> Config:
    """Return the configuration of gpt-oss: `truncate` is false, which the metadata of its files does not say."""
    scaling = _rope(reader).get("rope_scaling")
    return {
        **_experts(reader),
        **_layer_types(reader, 2),
        **({"rope_scaling": {**scaling, "truncate": False}} if isinstance(scaling, dict) else {}),
        "num_local_experts": reader.integer("expert_count"),
        "intermediate_size": _inner_of_experts(reader),
        "attention_bias": reader.has_tensor("blk.0.attn_q.bias"),
    }


def _mixtral(reader: _Reader) -> Config:
    window = reader.integer("attention.sliding_window", 0, least=0)
    return {
        **_experts(reader),
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": reader.integer("expert_count"),
        "intermediate_size": _inner_of_experts(reader),
        "sliding_window": window or None,
    }


def _inner_of_experts(reader: _Reader) -> int:
    """Return the width of an expert: by its own key, or else by the key of an MLP's width."""
    key = "expert_feed_forward_length"
    return reader.integer(key if reader.has(key) else "feed_forward_length")


def _llama(reader: _Reader) -> Config:
    if reader.integer("expert_count", 0, least=0):
        return _mixtral(reader)
    reader.only("expert_used_count", 0)
    if reader.integer("attention.sliding_window", 0, least=0):
        return {"architectures": ["MistralForCausalLM"], "sliding_window": reader.integer("attention.sliding_window")}
    return _biases(reader)


def _gemma(reader: _Reader, each: int) -> Config:
    hidden, heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    width: float = reader.integer("attention.key_length", hidden // heads)
    if _SCALED_BY_SHARE[reader.prefix.removesuffix(".")] == reader.integer("block_count"):
        width = hidden / heads
    return {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": width, **_layer_types(reader, each)}


def _gemma2(reader: _Reader) -> Config:
    return {
        **_gemma(reader, 2),
        "attn_logit_softcapping": reader.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": reader.number("final_logit_softcapping", 30.0),
    }


def _gemma3(reader: _Reader) -> Config:
    return {
        **_gemma(reader, 6),
        "rope_local_base_freq": reader.number("rope.freq_base_swa", _LOCAL_THETA),
        **reader.optional("final_logit_softcapping", "final_logit_softcapping"),
    }


def _phi3(reader: _Reader) -> Config:
    return {"sliding_window": reader.integer("attention.sliding_window", 0, least=0) or None}


def _granite(reader: _Reader) -> Config:
    return {
        **_biases(reader),
        "attention_multiplier": reader.number("attention.scale"),
        "embedding_multiplier": reader.number("embedding_scale", 1.0),
        "residual_multiplier": reader.number("residual_scale", 1.0),
        "logits_scaling": reader.number("logit_scale", 1.0),
    }


def _smollm3(reader: _Reader) -> Config:
    return {**_biases(reader), "no_rope_layer_interval": 4}


def _olmo2(reader: _Reader) -> Config:
    if reader.integer("attention.sliding_window", 0, least=0):
        return {"architectures": ["Olmo3ForCausalLM"], **_layer_types(reader, 4)}
    return {}


def _cohere(reader: _Reader) -> Config:
    return {
        "layer_norm_eps": reader.number("attention.layer_norm_epsilon"),
        "logit_scale": reader.number("logit_scale", 1.0),
    }


def _of_windows(reader: _Reader) -> Config:
    return _layer_types(reader, 4)


def _cohere2(reader: _Reader) -> Config:
    return {**_cohere(reader), **_layer_types(reader, 4)}


@dataclass(frozen=True, slots=True)
class _Architecture:
    """A value of general.architecture: the class of transformers, and the keys that not all have."""

    name: str
    own: Callable[[_Reader], Config] = lambda _: {}
    interleaved: bool = False  # rows of queries and keys, by llama.cpp's converter


_WITH_EXPERTS = (
    *("llama.", "qwen2moe.", "qwen3moe.", "olmoe.", "gpt-oss."),
    *("glm4moe.", "dots1.", "ernie4_5-moe."),
)
_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", _llama, interleaved=True),
    "mistral3": _Architecture("MistralForCausalLM", lambda _: {"sliding_window": None}, interleaved=True),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM", _attention_bias),
    "gemma2": _Architecture("Gemma2ForCausalLM", _gemma2),
    "gemma3": _Architecture("Gemma3ForCausalLM", _gemma3),
    "phi3": _Architecture("Phi3ForCausalLM", _phi3),
    "granite": _Architecture("GraniteForCausalLM", _granite, interleaved=True),
    "smollm3": _Architecture("SmolLM3ForCausalLM", _smollm3, interleaved=True),
    "olmo2": _Architecture("Olmo2ForCausalLM", _olmo2),
    "glm4": _Architecture("Glm4ForCausalLM", _attention_bias),
    "seed_oss": _Architecture("SeedOssForCausalLM", _attention_bias),
    "ernie4_5": _Architecture("Ernie4_5ForCausalLM"),
    "command-r": _Architecture("CohereForCausalLM", _cohere),
    "cohere2": _Architecture("Cohere2ForCausalLM", _cohere2),
    "exaone4": _Architecture("Exaone4ForCausalLM", _of_windows),
    "qwen2moe": _Architecture("Qwen2MoeForCausalLM", _qwen2moe),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", _qwen3moe),
    "olmoe": _Architecture("OlmoeForCausalLM", _olmoe),
    "gpt-oss": _Architecture("GptOssForCausalLM", _gpt_oss),
    "glm4moe": _Architecture("Glm4MoeForCausalLM", _glm4moe),
    "dots1": _Architecture("Dots1ForCausalLM", _dots1),
    "ernie4_5-moe": _Architecture("Ernie4_5_MoeForCausalLM", _ernie4_5_moe),
}

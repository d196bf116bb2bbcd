"""Tiny random checkpoints of the supported families, complete with tokenizer, chat template and generation config.

Promises: deterministic for the same arguments; made by transformers, so names, layout and configuration are what real
checkpoints have. Takes a second or two for the first (the import), milliseconds for the next.
Must not know: the modules under test.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # the most used, which the longest tests are about
_BOTH = ["sliding_attention", "full_attention"]
VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
EOS = "<|im_end|>"

_TEXT = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A quire is four sheets of paper folded into eight leaves; a ream is twenty quires.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Question: what is the capital of France? Answer: the capital of France is Paris.",
    "naïve café, übergroß, 日本語, Привет, 😀",
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": None,
}
_GPT_OSS_ROPE = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "truncate": False}
_FAMILY_SHAPE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 37, "layer_types": _BOTH},
    "gemma3": {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 37, "layer_types": _BOTH},
    "gemma4": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 37,
        "layer_types": _BOTH,
        "final_logit_softcapping": 30.0,
    },
    "phi3": {},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.15,
        "logits_scaling": 4.0,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": {"sliding_window": 37, "layer_types": _BOTH},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "seed_oss": {"head_dim": 32},
    "ernie4_5": {"head_dim": 32},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"head_dim": 32, "sliding_window": 37, "layer_types": _BOTH, "logit_scale": 0.3},
    "exaone4": {"sliding_window": 37, "layer_types": _BOTH},
    "ministral": {"head_dim": 16, "sliding_window": 37, "layer_types": _BOTH},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "gemma4_moe": {
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 37,
        "layer_types": _BOTH,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    },
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 56,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {
        "head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "moe_intermediate_size": 40,
        "use_qk_norm": True,
    },
    "dots1": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
        "sliding_window": 37,
        "max_window_layers": 1,
    },
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 40},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2},
    "afmoe": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "num_hidden_layers": 3,
        "route_scale": 1.7,
        "mup_enabled": True,
        "sliding_window": 37,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 37,
        "layer_types": _BOTH,
        "rope_parameters": {**_GPT_OSS_ROPE, "original_max_position_embeddings": 64},
    },
}
# The names of transformers' classes.
_CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "phi3": "Phi3",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "glm": "Glm",
    "glm4": "Glm4",
    "seed_oss": "SeedOss",
    "ernie4_5": "Ernie4_5",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "exaone4": "Exaone4",
    "ministral": "Ministral",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "gemma4_moe": "Gemma4",
    "qwen2_moe": "Qwen2Moe",
    "glm4_moe": "Glm4Moe",
    "dots1": "Dots1",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "flex_olmo": "FlexOlmo",
    "afmoe": "Afmoe",
    "gpt_oss": "GptOss",
}


ALL_FAMILIES = tuple(_CLASSES)


def make_checkpoint(
    path: Path | str,
    family: str = "qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    kind: str = "ForCausalLM",
    **overrides: Any,
) -> Path:
    """Write a checkpoint directory and return it. `overrides` are options of the family's transformers config.

    `kind`: how the name of the family's class ends.
    """
    path = Path(path)
    model = make_model(family, seed=seed, dtype=dtype, kind=kind, **overrides)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


@cache
def shared_checkpoint(family: str = "qwen3", **overrides: Any) -> Path:
    """The same, made once per process and removed at its end. Not to be written to."""
    path = Path(tempfile.mkdtemp(prefix=f"quire-{family}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return make_checkpoint(path, family, **overrides)


def make_model(
    family: str, *, seed: int = 0, dtype: str = "float32", kind: str = "ForCausalLM", **overrides: Any
) -> Any:
    """A transformers model with random weights, norms and biases of a size that makes its choices clear-cut."""
    import transformers

    name = _CLASSES[family]
    of_texts = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    config = of_texts(**{**_SHAPE, **_FAMILY_SHAPE[family], **overrides})
    model = getattr(transformers, f"{name}{kind}")(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in sorted(model.named_parameters()):
        if "norm" in parameter_name:
            # Gemma's hold what is added to 1.
            values = float(family not in {"gemma2", "gemma3"}) + 0.2 * torch.randn(parameter.shape, generator=generator)
        elif parameter.dim() == 1:
            values = 0.2 * torch.randn(parameter.shape, generator=generator)
        else:
            inputs = parameter.shape[1]
            if parameter.dim() == 3 and family != "gpt_oss":  # of all experts; gpt-oss's are transposed
                inputs = parameter.shape[2]
            values = torch.randn(parameter.shape, generator=generator) * 1.5 / inputs**0.5
        parameter.data = values
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5 + torch.rand(1, generator=generator).item())
        elif name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model.to(getattr(torch, dtype)).eval()


def write_tokenizer(path: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE with ChatML."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(_tokenizer_json())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": EOS,
        "model_max_length": 512,
        "chat_template": _CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 2, trainer)
    return tokenizer.to_str()

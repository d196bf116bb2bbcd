"""The files of the checkpoint folder. Promises that nothing in them depends on the clock or the machine's name.

Must not know how the weights came to be.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from make_demo.chat_template import CHAT_TEMPLATE
from make_demo.model_card import model_card
from make_demo.recipe import Recipe


def model_config(recipe: Recipe) -> dict[str, object]:
    """The config.json of the checkpoint."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": recipe.context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
    }


def write_checkpoint(
    recipe: Recipe, tokenizer: Tokenizer, model: torch.nn.Module, out: Path, *, steps: int, num_tokens: int, loss: float
) -> None:
    """All files of a checkpoint folder; nothing in them depends on the clock or the machine's name."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.context,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    training = {**asdict(recipe), "steps_done": steps, "num_tokens": num_tokens, "mean_loss": round(loss, 4)}
    training["num_parameters"] = sum(w.numel() for w in weights.values())
    training["torch"] = torch.__version__
    files = {
        "config.json": model_config(recipe),
        "generation_config.json": {"eos_token_id": [2, 0], "pad_token_id": 0},
        "tokenizer_config.json": tokenizer_config,
        "training.json": training,
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(model_card(training), encoding="utf-8")

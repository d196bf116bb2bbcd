"""Models to measure: their sizes, and checkpoints of random weights in those sizes.

Promises: a checkpoint is what Hugging Face would have written for Qwen3, without transformers and without a download.
Must not know: the engine, what is measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense Qwen3 with a tied head."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int

    @property
    def qkv(self) -> int:
        """Columns of the projection to queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


QWEN3_06B = ModelShape(
    name="Qwen3-0.6B shape",
    hidden=1024,
    intermediate=3072,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    positions=40960,
)
QWEN3_8B = ModelShape(
    name="8B shape",
    hidden=4096,
    intermediate=12288,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    positions=40960,
)
TINY = ModelShape(
    name="tiny shape",
    hidden=64,
    intermediate=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=512,
    positions=512,
)


def write_checkpoint(shape: ModelShape, path: Path, *, seed: int = 0) -> Path:
    """bf16 weights of ordinary size. Takes seconds for 0.6 billion."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.empty(rows, columns, dtype=torch.bfloat16)
        return values.uniform_(-1.5, 1.5, generator=generator).mul_(columns**-0.5)

    def ones(width: int) -> Tensor:
        return torch.ones(width, dtype=torch.bfloat16)

    tensors = {"model.embed_tokens.weight": matrix(shape.vocab, shape.hidden), "model.norm.weight": ones(shape.hidden)}
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones(shape.hidden),
            f"{layer}.post_attention_layernorm.weight": ones(shape.hidden),
            f"{layer}.self_attn.q_proj.weight": matrix(queries, shape.hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(keys, shape.hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(keys, shape.hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(shape.hidden, queries),
            f"{layer}.self_attn.q_norm.weight": ones(shape.head_dim),
            f"{layer}.self_attn.k_norm.weight": ones(shape.head_dim),
            f"{layer}.mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{layer}.mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{layer}.mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        }
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_config(shape)))
    return path


def _config(shape: ModelShape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }

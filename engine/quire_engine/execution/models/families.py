"""The differences between supported architectures, as data and not as code paths.

Promises: one `Family` per architecture name a checkpoint may declare; the decoder itself is the same for all. Must not
know: torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Where a bias comes from: the family always has it, never has it, or a named option of the checkpoint says so.
Bias = Literal["always", "never", "attention_bias", "mlp_bias"]
# Which layers see a sliding window: none, all of them, or those that the Qwen options name.
Window = Literal["never", "all_layers", "layer_types"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: its biases, norms and windows, and the defaults of options that checkpoints may omit."""

    architecture: str
    qkv_bias: Bias
    o_bias: Bias
    mlp_bias: Bias
    qk_norm: bool
    window: Window
    default_kv_heads: int | None  # None: as many as query heads
    default_head_dim: int | None  # None: hidden_size / num_attention_heads
    default_max_positions: int
    default_window: int | None = None


_FAMILIES = (
    Family(
        architecture="LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        qk_norm=False,
        window="never",
        default_kv_heads=None,
        default_head_dim=None,
        default_max_positions=2048,
    ),
    Family(
        architecture="MistralForCausalLM",
        qkv_bias="never",
        o_bias="never",
        mlp_bias="never",
        qk_norm=False,
        window="all_layers",
        default_kv_heads=8,
        default_head_dim=None,
        default_max_positions=131072,
        default_window=4096,
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias="always",
        o_bias="never",
        mlp_bias="never",
        qk_norm=False,
        window="layer_types",
        default_kv_heads=32,
        default_head_dim=None,
        default_max_positions=32768,
        default_window=4096,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="never",
        qk_norm=True,
        window="layer_types",
        default_kv_heads=32,
        default_head_dim=128,
        default_max_positions=32768,
        default_window=4096,
    ),
)

FAMILIES: dict[str, Family] = {family.architecture: family for family in _FAMILIES}

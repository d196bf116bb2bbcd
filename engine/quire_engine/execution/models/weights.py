"""From a checkpoint's safetensors files to a decoder.

Promises: the files hold exactly the tensors that the configuration implies, in the shapes it implies, or a
ModelLoadError says which do not; nothing outside the directory is opened; no pickle is ever read.
Must not know: how an op is computed, requests, the pool.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire_engine.execution.models.checkpoint import Checkpoint, open_checkpoint
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.models.layers import Layer, Weights
from quire_engine.execution.models.rope import rope_table
from quire_kernels.kernel_set import AttentionShape, KernelSet, LinearWeight

_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"


def load_decoder(
    path: Path,
    config: ModelConfig,
    *,
    kernels: KernelSet,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> Decoder:
    """Load `path`'s weights, converted to `dtype`, onto `device`; positions up to `max_model_len` can be computed.

    Raises ModelLoadError for missing, left-over, misshapen or unreadable tensors, naming file and tensors.
    """
    shapes = expected_shapes(config)
    with open_checkpoint(path) as checkpoint:
        checkpoint.drop(lambda name: name.endswith(".rotary_emb.inv_freq"))  # derived, saved by old exporters
        if config.tie_word_embeddings:
            _drop_tied_head(checkpoint)
        checkpoint.require(shapes)
        weights = _Loader(checkpoint, config, kernels, dtype, device).load(max_model_len)
    num_parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    return Decoder(config, weights, kernels, num_parameters=num_parameters)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    q_width, kv_width = config.num_heads * width, config.num_kv_heads * width
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    projections = (
        ("self_attn.q_proj", q_width, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_width, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_width, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_width, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (width,)
            shapes[layer + "self_attn.k_norm.weight"] = (width,)
        for name, rows, columns, bias in projections:
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
    return shapes


def matrices_after_attention(layer: int) -> tuple[str, ...]:
    """Names of a layer's matrices that are multiplied with what its attention gives."""
    names = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return tuple(f"model.layers.{layer}.{name}.weight" for name in names)


def _drop_tied_head(checkpoint: Checkpoint) -> None:
    """Some checkpoints store the tied head a second time. It must be the embedding."""
    if _HEAD not in checkpoint.names:
        return
    if _EMBEDDING in checkpoint.names and not torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDING)):
        raise checkpoint.error(_HEAD, "differs from the embedding although tie_word_embeddings is set")
    checkpoint.drop(lambda name: name == _HEAD)


class _Loader:
    """Takes tensors from a checkpoint whose names and shapes were checked."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, kernels: KernelSet, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._kernels = kernels
        self._dtype = dtype
        self._device = device

    def load(self, max_model_len: int) -> Weights:
        config = self._config
        embedding = self._tensor(_EMBEDDING)
        head = embedding if config.tie_word_embeddings else self._tensor(_HEAD)
        return Weights(
            embedding=embedding,
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            final_norm=self._tensor(_FINAL_NORM),
            head=self._kernels.pack_linear(head, None),
            rope=rope_table(config.rope, config.head_dim, max_model_len).to(self._device),
        )

    def _layer(self, index: int) -> Layer:
        config, prefix = self._config, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            attention_norm=self._tensor(prefix + "input_layernorm.weight"),
            qkv=self._linear([attention + name for name in ("q_proj", "k_proj", "v_proj")], config.qkv_bias),
            attention=AttentionShape(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
                window=config.windows[index],
                q_norm=self._tensor(attention + "q_norm.weight") if config.qk_norm else None,
                k_norm=self._tensor(attention + "k_norm.weight") if config.qk_norm else None,
                norm_eps=config.norm_eps,
            ),
            o=self._linear([attention + "o_proj"], config.o_bias),
            mlp_norm=self._tensor(prefix + "post_attention_layernorm.weight"),
            gate_up=self._kernels.pack_gate_up(
                self._tensor(mlp + "gate_proj.weight"),
                self._tensor(mlp + "up_proj.weight"),
                self._joined([mlp + "gate_proj.bias", mlp + "up_proj.bias"]) if config.mlp_bias else None,
            ),
            down=self._linear([mlp + "down_proj"], config.mlp_bias),
        )

    def _linear(self, names: list[str], bias: bool) -> LinearWeight:
        """One projection made of the rows of several."""
        weight = self._joined([name + ".weight" for name in names])
        return self._kernels.pack_linear(weight, self._joined([name + ".bias" for name in names]) if bias else None)

    def _joined(self, names: list[str]) -> Tensor:
        tensors = [self._tensor(name) for name in names]
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]

    def _tensor(self, name: str) -> Tensor:
        # Always a copy: the file may be replaced while we serve, and its mapping would follow.
        return self._checkpoint.tensor(name).to(device=self._device, dtype=self._dtype, copy=True)

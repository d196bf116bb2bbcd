"""From a checkpoint's safetensors files to a decoder.

Promises: the files hold exactly the tensors that the configuration implies, in the shapes it implies, or a
ModelLoadError says which do not; nothing outside the directory is opened; no pickle is ever read.
Must not know: how an op is computed, requests, the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from quire_engine.execution.models.checkpoint import Checkpoint, open_checkpoint
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.models.layers import Layer, Weights
from quire_engine.execution.models.rope import rope_table
from quire_engine.execution.models.sources import CheckpointSource, WeightSource
from quire_engine.execution.packed.header import ALIGNMENT
from quire_engine.execution.progress import Tell, tell_nobody
from quire_kernels.kernel_set import AttentionShape, KernelSet, LinearWeight
from quire_kernels.packed_form import PackedForm

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
    tell: Tell = tell_nobody,
    threads: int = 1,
) -> Decoder:
    """Load `path`'s weights, converted to `dtype`, onto `device`; positions up to `max_model_len` can be computed.

    Raises ModelLoadError for missing, left-over, misshapen, unreadable or non-finite tensors, naming file and tensors.
    """
    with checked_checkpoint(path, config) as checkpoint:
        source = CheckpointSource(checkpoint, kernels, dtype, device, tell=tell, threads=threads)
        weights = assemble(source, config, device=device, max_model_len=max_model_len)
    return decoder_of(weights, config, kernels)


@contextmanager
def checked_checkpoint(path: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """The checkpoint's files, once they hold exactly what the configuration implies. Raises ModelLoadError."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.drop(lambda name: name.endswith(".rotary_emb.inv_freq"))  # derived, saved by old exporters
        if config.tie_word_embeddings:
            _drop_tied_head(checkpoint)
        checkpoint.require(expected_shapes(config))
        yield checkpoint


def decoder_of(weights: Weights, config: ModelConfig, kernels: KernelSet) -> Decoder:
    """The decoder with these weights."""
    num_parameters = sum(math.prod(shape) for shape in expected_shapes(config).values())
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


def most_image_bytes(config: ModelConfig, form: PackedForm, itemsize: int) -> int:
    """What an image of a whole model may come to: every matrix packed, the embedding and what is small as it is."""
    total = config.vocab_size * config.hidden_size * itemsize + ALIGNMENT
    for shape in expected_shapes(config).values():
        total += form.most_bytes(*shape) if len(shape) == 2 else shape[0] * itemsize + ALIGNMENT
    return total


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
    checkpoint.release(_HEAD)
    checkpoint.drop(lambda name: name == _HEAD)


def assemble(source: WeightSource, config: ModelConfig, *, device: torch.device, max_model_len: int) -> Weights:
    """The decoder's weights from wherever they come."""
    embedding = source.tensor(_EMBEDDING)
    # The largest matrix comes while little else is in memory: what packing needs beside the weights is then a layer.
    head = source.head("head", _EMBEDDING if config.tie_word_embeddings else _HEAD, embedding)
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(source, config, index) for index in range(config.num_layers)),
        final_norm=source.tensor(_FINAL_NORM),
        head=head,
        rope=rope_table(config.rope, config.head_dim, max_model_len).to(device),
    )


def _layer(source: WeightSource, config: ModelConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
    return Layer(
        attention_norm=source.tensor(prefix + "input_layernorm.weight"),
        qkv=_matrix(source, prefix + "qkv", qkv, config.qkv_bias),
        attention=AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.windows[index],
            q_norm=source.tensor(attention + "q_norm.weight") if config.qk_norm else None,
            k_norm=source.tensor(attention + "k_norm.weight") if config.qk_norm else None,
            norm_eps=config.norm_eps,
        ),
        o=_matrix(source, prefix + "o", [attention + "o_proj"], config.o_bias),
        mlp_norm=source.tensor(prefix + "post_attention_layernorm.weight"),
        gate_up=source.gate_up(
            prefix + "gate_up",
            mlp + "gate_proj.weight",
            mlp + "up_proj.weight",
            [mlp + "gate_proj.bias", mlp + "up_proj.bias"] if config.mlp_bias else [],
        ),
        down=_matrix(source, prefix + "down", [mlp + "down_proj"], config.mlp_bias),
    )


def _matrix(source: WeightSource, place: str, names: Sequence[str], bias: bool) -> LinearWeight:
    weights = [name + ".weight" for name in names]
    return source.matrix(place, weights, [name + ".bias" for name in names] if bias else [])

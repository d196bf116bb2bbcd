"""EAGLE-3 heads (Li et al., arXiv:2503.01840): one layer that guesses from what three layers of the model have made.

Promises: a head that is not of the published layout, or not made for the model, is refused and the reason named.
Must not know: sequences, requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire_engine.errors import ModelLoadError
from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.checkpoint import Checkpoint, open_checkpoint
from quire_engine.execution.models.config import ModelConfig, config_as
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.models.matrix_parts import Part
from quire_engine.execution.models.options import Options
from quire_engine.execution.models.rope import rope_table
from quire_engine.execution.models.served import Wanted
from quire_engine.execution.models.weights import CheckpointSource
from quire_engine.execution.progress import Tell
from quire_kernels.kernel_set import AttentionShape, KernelSet, KVFormat, LinearWeight, Norm
from quire_kernels.reference.linear import rms_norm
from quire_kernels.select import select

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LAYER = "midlayer."
_HEAD, _EMBEDDING, _IDS, _IS_DRAFTED = "lm_head.weight", "embed_tokens.weight", "d2t", "t2d"
_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """A head, as its config.json and the headers of its files have it."""

    path: Path
    layer: ModelConfig  # the one layer; its vocabulary is the model's
    draft_vocab_size: int  # tokens that it can guess
    entering: tuple[int, int, int]  # the model's layers whose input it reads: low, middle, high
    has_embedding: bool  # of its own
    has_ids: bool  # which token each of its logits is; else they are the model's

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of numbers."""
        layer, hidden = self.layer, self.layer.hidden_size
        q_width, kv_width = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        matrices = {
            "self_attn.q_proj": (q_width, 2 * hidden),
            "self_attn.k_proj": (kv_width, 2 * hidden),
            "self_attn.v_proj": (kv_width, 2 * hidden),
            "self_attn.o_proj": (hidden, q_width),
            "mlp.gate_proj": (layer.intermediate_size, hidden),
            "mlp.up_proj": (layer.intermediate_size, hidden),
            "mlp.down_proj": (hidden, layer.intermediate_size),
        }
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        return {
            "fc.weight": (hidden, 3 * hidden),
            **{f"{_LAYER}{name}.weight": shape for name, shape in matrices.items()},
            **{f"{_LAYER}{name}.weight": (hidden,) for name in norms},
            "norm.weight": (hidden,),
            _HEAD: (self.draft_vocab_size, hidden),
            **({_EMBEDDING: (layer.vocab_size, hidden)} if self.has_embedding else {}),
        }

    def num_bytes(self, itemsize: int, packed_bits: float | None) -> int:
        """Return about how many bytes the weights take in memory."""
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        plain = sum(size for name, size in sizes.items() if len(self.shapes[name]) == 1 or name == _EMBEDDING)
        return plain * itemsize + int((sum(sizes.values()) - plain) * (packed_bits or 8 * itemsize)) // 8


def read_eagle_config(path: Path, model: ModelConfig) -> EagleConfig:
    """The head in this folder, which must be made for such a model. Raises ModelLoadError."""
    options = Options.read(path / "config.json")
    names = options.raw("architectures")
    if not isinstance(names, list) or names not in [[name] for name in _ARCHITECTURES]:
        raise options.error(f"architectures={names!r} is no EAGLE-3 head; only {' and '.join(_ARCHITECTURES)} are")
    vocab_size = options.integer("vocab_size", model.vocab_size)
    draft_vocab_size = options.integer("draft_vocab_size", vocab_size)
    entering = _entering(options, model.num_layers)
    num_layers = options.integer("num_hidden_layers", 1)
    layer = config_as(options, "LlamaForCausalLM", str(names[0]))
    wanted = {"hidden_size": (layer.hidden_size, model.hidden_size), "vocab_size": (vocab_size, model.vocab_size)}
    for key, (found, own) in wanted.items():
        if found != own:
            raise options.error(f"{key}={found}, but the model's is {own}: the head is made for another model")
    if num_layers != 1:
        raise options.error(f"num_hidden_layers={num_layers}: a head has one layer")
    if layer.qkv_bias or layer.o_bias or layer.mlp_bias:
        raise options.error("attention_bias and mlp_bias of a head are not supported")
    if draft_vocab_size > vocab_size:
        raise options.error(f"draft_vocab_size={draft_vocab_size} is more than vocab_size={vocab_size}")
    with open_checkpoint(path) as checkpoint:
        config = EagleConfig(
            path=path,
            layer=layer,
            draft_vocab_size=draft_vocab_size,
            entering=entering,
            has_embedding=_EMBEDDING in checkpoint,
            has_ids=_IDS in checkpoint,
        )
        _checked_ids(checkpoint, config)
    return config


def _entering(options: Options, num_layers: int) -> tuple[int, int, int]:
    """The layers that the head's config names, or those of the published heads."""
    given = options.raw(_LAYERS_KEY)
    listed = given if isinstance(given, list) else [2, num_layers // 2, num_layers - 3] if given is None else []
    found = [each for each in listed if type(each) is int and 0 <= each < num_layers]
    if len(found) != 3 or len(listed) != 3:
        reads = f"reads layers {listed}" if given is None else f"has {_LAYERS_KEY}={given!r}"
        raise options.error(f"the head {reads}, and the model has {num_layers}")
    return found[0], found[1], found[2]


def _checked_ids(checkpoint: Checkpoint, config: EagleConfig) -> Tensor:
    """[draft_vocab_size] int64, the token of each logit, once the files hold what the config says. ModelLoadError."""
    count, vocab_size = config.draft_vocab_size, config.layer.vocab_size
    ids = torch.arange(count)
    if config.has_ids:
        stored = {_IDS: checkpoint.stored_as(_IDS)}
        wanted = {_IDS: ("I64", (count,))}
        if _IS_DRAFTED in checkpoint:
            stored[_IS_DRAFTED], wanted[_IS_DRAFTED] = checkpoint.stored_as(_IS_DRAFTED), ("BOOL", (vocab_size,))
        for name, found in stored.items():
            if found != wanted[name]:
                dtype, shape = wanted[name]
                raise checkpoint.error(name, f"is {found[0]} {list(found[1])}, not {dtype} {list(shape)}")
        ids = ids + checkpoint.tensor(_IDS)
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
            raise checkpoint.error(_IDS, f"leads to a token outside the model's {vocab_size}")
    elif count != vocab_size:
        raise ModelLoadError(f"{config.path}: missing tensors: {_IDS}, with draft_vocab_size={count} of {vocab_size}")
    checkpoint.drop(lambda name: name in {_IDS, _IS_DRAFTED})
    checkpoint.require(config.shapes)
    return ids


def undivided(kernels: KernelSet, layer: ModelConfig, model: Wanted) -> KernelSet:
    """Kernels for the head of a model whose own ones divide their products among ranks: the same ones, alone."""
    asked = model.asked
    return select(
        model.device,
        model.dtype,
        "cpu",
        kv=KVFormat(head_dim=layer.head_dim, block_size=asked.limits.block_size, kv_type=asked.kv_cache_dtype),
        quantization=asked.quantization,
        threads=model.threads,
        cpu_variant=kernels.variant,
    )


class EagleHead:
    """The head's weights, in the kernel set's form, and its layer."""

    def __init__(
        self, config: EagleConfig, model: Decoder, kernels: KernelSet, dtype: torch.dtype, *, positions: int, tell: Tell
    ) -> None:
        """Reads the files. `model`: whose embedding it takes where it has none. Raises ModelLoadError."""
        self._kernels, self._model, layer = kernels, model, config.layer
        device = torch.device("cpu")
        with open_checkpoint(config.path) as checkpoint:
            self._ids: list[int] = _checked_ids(checkpoint, config).tolist()
            source = CheckpointSource(checkpoint, kernels, dtype, device, tell=tell)

            def matrix(*names: str) -> LinearWeight:
                return source.matrix(names[0], [Part(name + ".weight") for name in names], [])

            attention, mlp = _LAYER + "self_attn.", _LAYER + "mlp."
            self._fc = matrix("fc")
            self._qkv = matrix(*(attention + name for name in ("q_proj", "k_proj", "v_proj")))
            self._o, self._down = matrix(attention + "o_proj"), matrix(mlp + "down_proj")
            gate, up = (Part(f"{mlp}{name}.weight") for name in ("gate_proj", "up_proj"))
            self._gate_up = source.gate_up("gate_up", [gate], [up], [])
            self._head = matrix("lm_head")
            self._embedding = source.tensor(_EMBEDDING) if config.has_embedding else None
            self._of_tokens, self._of_hidden, self._of_attention = (
                Norm(source.tensor(f"{_LAYER}{name}.weight"), layer.norm_eps)
                for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
            )
            self._last = Norm(source.tensor("norm.weight"), layer.norm_eps)
        self._activation = layer.activation
        self._rope = rope_table(layer.ropes[0], layer.head_dim, positions, rotary_dim=layer.rotary_dim(layer.head_dim))
        self._shape = AttentionShape(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scale=layer.attention_scale,
            norm_eps=layer.norm_eps,
        )

    def joined(self, entered: Tensor) -> Tensor:
        """The rows that entered the model's three layers, [T, 3H], as the head takes them, [T, H]."""
        return self._kernels.norm_linear(entered, None, self._fc)

    def forward(self, step: ModelInput, joined: Tensor, kv: Tensor) -> Tensor:
        """[S, H] of the sample rows. `step` has the token behind each row, `joined` [T, H] is the row."""
        kernels, embedding = self._kernels, self._embedding
        ids = step.input_ids
        tokens = self._model.embed(ids) if embedding is None else kernels.embed(embedding, ids)
        parts = ((tokens, self._of_tokens), (joined, self._of_hidden))
        both = torch.cat([rms_norm(rows, norm.weight, norm.eps) for rows, norm in parts], dim=1)  # [T, 2H]
        wide = kernels.norm_linear(both, None, self._qkv)
        q = kernels.rope_write(wide, self._rope, self._shape, kv, 0, step)
        rows, x = step if step.sampled is None else step.sampled, joined
        if step.sampled is not None:
            q, x = q[step.sample_rows], x[step.sample_rows]
        if not len(x):
            return x
        mixed = kernels.attention(q, self._shape, kv, 0, rows)
        x = kernels.linear_add(mixed, self._o, x.clone(), 1.0)
        wide = kernels.norm_gate_up(x, self._of_attention, self._gate_up, self._activation)
        return kernels.linear_add(wide, self._down, x, 1.0)

    def guess(self, hidden: Tensor) -> Sequence[int]:
        """The likeliest next token behind each row of `forward`'s [S, H]."""
        if self._kernels.greedy is not None:
            columns, _ = self._kernels.greedy(hidden, self._last, self._head, None)
        else:
            columns = self._kernels.logits(hidden, self._last, self._head).argmax(dim=1).tolist()
        return [self._ids[column] for column in columns]

"""From a checkpoint's safetensors files, or an image of packed weights, to a decoder.

The files hold exactly the tensors that the configuration implies, or a ModelLoadError says which do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire_engine.execution.models.checkpoint import Checkpoint, StoredSize, StoredTensors, open_checkpoint
from quire_engine.execution.models.config import ModelConfig, RopeConfig
from quire_engine.execution.models.decoder import Decoder, Weights
from quire_engine.execution.models.dequantising import decode_quantised
from quire_engine.execution.packed.image import ALIGNMENT, Image, ImageWriter
from quire_engine.execution.progress import Progress, Tell, tell_nobody
from quire_engine.kv_groups import KVLayout, one_group
from quire_kernels.kernel_set import (
    Attend,
    AttentionShape,
    KeepSampled,
    KernelSet,
    LayerOp,
    LinearAdd,
    LinearWeight,
    Norm,
    NormAdd,
    NormGateUp,
    NormLinear,
    Project,
    RopeWrite,
    Source,
)
from quire_kernels.packed_form import PackedForm
from quire_kernels.stored import StoredMatrix, joined

_VALUES_AT_ONCE = 4 << 20  # that one thread converts
_HEAD = "lm_head.weight"
_HEADS = (_HEAD, "score.weight")  # the second one is a classifier's, which the server computes
_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
# Of models that see and hear too; what is left beside these and the text part is an error.
_OTHER_PARTS = (
    *("model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "model.audio_tower.", "audio_tower."),
    *("model.multi_modal_projector.", "multi_modal_projector.", "model.embed_vision.", "mtp."),
)


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

    Nothing outside the directory is opened and no pickle is ever read. Raises ModelLoadError for missing, left-over,
    misshapen, unreadable or non-finite tensors, naming file and tensors.
    """
    with checked_checkpoint(path, config) as checkpoint:
        source = CheckpointSource(checkpoint, kernels, dtype, device, tell=tell, threads=threads)
        layout = one_group(config.num_layers)
        weights = assemble(source, config, layout=layout, device=device, max_model_len=max_model_len)
    return decoder_of(weights, config, kernels)


@contextmanager
def checked_checkpoint(path: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """The checkpoint's files, once they hold exactly what the configuration implies. Raises ModelLoadError."""
    with open_checkpoint(path) as checkpoint:
        take_text(checkpoint, config)
        if config.headless:
            checkpoint.drop(lambda name: name in _HEADS)
        elif config.tie_word_embeddings:
            _drop_tied_head(checkpoint)
        checkpoint.require(expected_shapes(config))
        yield checkpoint


def take_text(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Give the tensors of the decoder the names that they have in a model of texts alone, and forget the others'.

    Of quantised matrices the checkpoint has the decoded ones from here on.
    """
    if config.quantisation is not None:
        decode_quantised(checkpoint, config.quantisation)
    checkpoint.drop(lambda name: name.endswith(".rotary_emb.inv_freq"))  # derived, saved by old exporters
    if "embed_tokens.weight" in checkpoint.names:  # only the part below the heads was saved
        checkpoint.rename(lambda name: name if name.startswith(("lm_head.", "score.")) else f"model.{name}")
    if config.family.text_type is None:
        return
    checkpoint.drop(lambda name: name.startswith(_OTHER_PARTS))
    prefix = next((each for each in config.family.prefixes if each + "norm.weight" in checkpoint.names), None)
    if prefix is not None:
        checkpoint.rename(lambda name: name.replace(prefix, "model.", 1) if name.startswith(prefix) else name)
    checkpoint.rename(lambda name: _HEAD if name == "language_model." + _HEAD else name)


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
    family = config.family
    row = family.qk_norm == "row"
    projections = [
        ("self_attn.o_proj", hidden, q_width, config.o_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    if "qkv" in family.fused:
        projections.append(("self_attn.qkv_proj", q_width + 2 * kv_width, hidden, config.qkv_bias))
    else:
        widths = (("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width))
        projections += [("self_attn." + name, rows, hidden, config.qkv_bias) for name, rows in widths]
    if "gate_up" in family.fused:
        projections.append(("mlp.gate_up_proj", 2 * inner, hidden, config.mlp_bias))
    else:
        projections += [("mlp." + name, inner, hidden, config.mlp_bias) for name in ("gate_proj", "up_proj")]
    norms = family.norms
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        for norm in (norms.attention, norms.after_attention, norms.mlp, norms.after_mlp):
            if norm is not None:
                shapes[f"{layer}{norm}.weight"] = (hidden,)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (q_width if row else width,)
            shapes[layer + "self_attn.k_norm.weight"] = (kv_width if row else width,)
        for name, rows, columns, bias in projections:
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
    return shapes


def most_image_bytes(config: ModelConfig, form: PackedForm, itemsize: int) -> int:
    """An upper bound on the bytes of a model's image: matrices packed, the embedding, norms and biases as they are."""
    total = config.vocab_size * config.hidden_size * itemsize + ALIGNMENT
    for shape in expected_shapes(config).values():
        total += form.most_bytes(*shape) if len(shape) == 2 else shape[0] * itemsize + ALIGNMENT
    return total


def matrices_after_attention(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of a layer's matrices that are multiplied with what its attention gives."""
    mlp = ("mlp.gate_up_proj",) if "gate_up" in config.family.fused else ("mlp.gate_proj", "mlp.up_proj")
    return tuple(f"model.layers.{layer}.{name}.weight" for name in ("self_attn.o_proj", *mlp, "mlp.down_proj"))


def _drop_tied_head(checkpoint: Checkpoint) -> None:
    """Some checkpoints store the tied head a second time. It must be the embedding."""
    if _HEAD not in checkpoint.names:
        return
    if _EMBEDDING in checkpoint.names and not torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDING)):
        raise checkpoint.error(_HEAD, "differs from the embedding although tie_word_embeddings is set")
    checkpoint.release(_HEAD)
    checkpoint.drop(lambda name: name == _HEAD)


def assemble(
    source: WeightSource, config: ModelConfig, *, layout: KVLayout, device: torch.device, max_model_len: int
) -> Weights:
    """The decoder's weights from wherever they come, for a pool of this layout."""
    embedding = source.tensor(_EMBEDDING)
    # The largest matrix comes while little else is in memory: what packing needs beside the weights is then a layer.
    head = source.head("head", _EMBEDDING if config.tie_word_embeddings else _HEAD, embedding)
    layers = _Layers(source, config, layout, device=device, max_model_len=max_model_len)
    return Weights(
        embedding=embedding,
        program=tuple(op for index in range(config.num_layers) for op in layers.ops(index)),
        final_norm=layers.norm(_FINAL_NORM),
        head=head,
    )


class _Layers:
    """Makes the ops of a model's layers from its configuration and its weights."""

    def __init__(
        self, source: WeightSource, config: ModelConfig, layout: KVLayout, *, device: torch.device, max_model_len: int
    ) -> None:
        self._source, self._config, self._layout = source, config, layout
        self._order = pair_order(config)
        self._tables = {
            rope: rope_table(rope, config.head_dim, max_model_len, rotary_dim=config.rotary_dim).to(device)
            for rope in dict.fromkeys(config.ropes)
        }

    def ops(self, index: int) -> Iterator[LayerOp]:
        """Of one layer; those behind the last layer's keys and values are for the sample rows alone."""
        config, norms = self._config, self._config.family.norms
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        norm = self._norm_at(prefix, norms.attention)
        yield NormLinear(norm=norm, weight=self._qkv(prefix))
        shape, (group, layer) = self._shape(index, attention), self._layout.places[index]
        yield RopeWrite(shape=shape, rope=self._tables[config.ropes[index]], layer=layer, group=group)
        if index == config.num_layers - 1:
            yield KeepSampled()
        attend = Attend(shape=shape, layer=layer, group=group)
        o = self._matrix(prefix + "o", [Part(attention + "o_proj")], config.o_bias)
        if config.family.parallel:  # the MLP reads x before attention is added to it
            yield NormGateUp(norm=norm, weight=self._gate_up(prefix), activation=config.activation)
            yield attend
            yield from self._add("mixed", o, None)
        else:
            yield attend
            yield from self._add("mixed", o, self._norm_at(prefix, norms.after_attention))
            norm = self._norm_at(prefix, norms.mlp)
            yield NormGateUp(norm=norm, weight=self._gate_up(prefix), activation=config.activation)
        down = self._matrix(prefix + "down", [Part(mlp + "down_proj")], config.mlp_bias)
        yield from self._add("wide", down, self._norm_at(prefix, norms.after_mlp))

    def norm(self, name: str) -> Norm:
        """A norm of rows, in the form in which the family multiplies."""
        centred = self._config.family.norm_form == "centred"
        return Norm(self._norm_weight(name), self._config.norm_eps, centred)

    def _norm_weight(self, name: str) -> Tensor:
        form = self._config.family.norm_form
        if form == "rounded":
            return self._source.tensor(name)
        wide = self._source.tensor(name).float()
        return wide + 1.0 if form == "offset" else wide

    def _norm_at(self, prefix: str, name: str | None) -> Norm | None:
        return None if name is None else self.norm(f"{prefix}{name}.weight")

    def _add(self, source: Source, weight: LinearWeight, norm: Norm | None) -> Iterator[LayerOp]:
        """The projection is added to the residual stream at once, or normed first."""
        if norm is None:
            yield LinearAdd(source=source, weight=weight, scale=self._config.residual_scale)
        else:
            yield Project(source=source, weight=weight)
            yield NormAdd(norm=norm)

    def _shape(self, index: int, attention: str) -> AttentionShape:
        config = self._config
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm, k_norm = (self._head_norm(f"{attention}{name}.weight") for name in ("q_norm", "k_norm"))
        return AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.windows[index],
            bidirectional=config.bidirectional,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=config.norm_eps,
            softcap=config.score_cap,
        )

    def _head_norm(self, name: str) -> Tensor:
        """[head_dim], or of a row of heads, in the order of the values that it multiplies."""
        weight = self._norm_weight(name)
        if self._order is None:
            return weight
        return weight.view(-1, self._config.head_dim)[:, self._order].flatten()

    def _qkv(self, prefix: str) -> LinearWeight:
        config, attention = self._config, prefix + "self_attn."
        if "qkv" in config.family.fused:
            parts = [Part(attention + "qkv_proj")]
            if self._order is not None:
                rotated = (config.num_heads + config.num_kv_heads) * config.head_dim
                parts = [
                    Part(attention + "qkv_proj", stop=rotated, head_order=self._order),
                    Part(attention + "qkv_proj", start=rotated),
                ]
        else:
            parts = [Part(attention + name, head_order=self._order) for name in ("q_proj", "k_proj")]
            parts.append(Part(attention + "v_proj"))
        return self._matrix(prefix + "qkv", parts, config.qkv_bias)

    def _gate_up(self, prefix: str) -> LinearWeight:
        config, mlp = self._config, prefix + "mlp."
        gate, up = Part(mlp + "gate_proj"), Part(mlp + "up_proj")
        if "gate_up" in config.family.fused:
            inner = config.intermediate_size
            gate, up = Part(mlp + "gate_up_proj", stop=inner), Part(mlp + "gate_up_proj", start=inner)
        biases = [part.named(".bias") for part in (gate, up)] if config.mlp_bias else []
        return self._source.gate_up(prefix + "gate_up", gate.named(".weight"), up.named(".weight"), biases)

    def _matrix(self, place: str, parts: Sequence[Part], bias: bool) -> LinearWeight:
        weights, biases = ([part.named(kind) for part in parts] for kind in (".weight", ".bias"))
        return self._source.matrix(place, weights, biases if bias else [])


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a stored tensor, perhaps with the values of each head in another order."""

    name: str
    start: int = 0
    stop: int | None = None
    head_order: Tensor | None = None  # [head_dim]: the stored place of each

    def named(self, kind: str) -> Part:
        return replace(self, name=self.name + kind)

    def of(self, stored: Tensor) -> Tensor:
        rows = stored[self.start : self.stop]
        if self.head_order is None:
            return rows
        return rows.view(-1, len(self.head_order), *rows.shape[1:])[:, self.head_order].flatten(0, 1)


def pair_order(config: ModelConfig) -> Tensor | None:
    """[head_dim]: the stored places of a head's values, so that what rotates together lies half a head apart.

    None: they lie so. Values that do not rotate are paired with each other and meet angles of zero.
    """
    turned, width = config.rotary_dim, config.head_dim
    if config.family.pairs == "halves" and turned == width:
        return None
    places = torch.arange(turned)
    first, second = (
        (places[: turned // 2], places[turned // 2 :])
        if config.family.pairs == "halves"
        else (places[0::2], places[1::2])
    )
    kept = torch.arange(turned, width)
    half = len(kept) // 2
    return torch.cat([first, kept[:half], second, kept[half:]])


class WeightSource(Protocol):
    """Gives each tensor once, by its name in the checkpoint, and each matrix once, by its place in the decoder.

    From every source the same bits.
    """

    def tensor(self, name: str) -> Tensor: ...

    def matrix(self, place: str, weights: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        """One projection made of the rows of several."""
        ...

    def gate_up(self, place: str, gate: Part, up: Part, biases: Sequence[Part]) -> LinearWeight: ...

    def head(self, place: str, name: str, embedding: Tensor) -> LinearWeight:
        """The last projection; `embedding` is what `tensor` gave for it where both are one."""
        ...


class CheckpointSource:
    """Reads, converts, checks and packs; with an image, into that.

    Beside what is kept, one matrix at a time is in memory. A value that is not finite is a ModelLoadError that names
    tensor and file.
    """

    def __init__(
        self,
        checkpoint: StoredTensors,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tell: Tell,
        image: ImageWriter | None = None,
        threads: int = 1,
    ) -> None:
        """`image`: for kernels that have a packed form."""
        self._checkpoint = checkpoint
        self._form = kernels.packed_form
        self._dtype, self._device = dtype, device
        self._image = image
        self._threads = threads
        self._pack_linear, self._pack_gate_up = kernels.pack_linear, kernels.pack_gate_up
        if image is not None and self._form is not None:
            self._pack_linear, self._pack_gate_up = self._form.packer(image.allocate)
        self._pack_stored = None if kernels.stored_bits is None else kernels.pack_stored
        if image is not None and self._form is not None and self._pack_stored is not None:
            self._pack_stored = self._form.stored_packer(image.allocate)
        phase = "reading weights" if self._form is None else "packing weights"
        self._progress = Progress(phase, checkpoint.num_bytes, tell)

    def tensor(self, name: str) -> Tensor:
        stored = self._checkpoint.tensor(name)
        if self._image is None:
            # Always a copy: the file may be replaced while we serve, and its mapping would follow.
            value = stored.to(device=self._device, dtype=self._dtype, copy=True)
        else:
            value = self._image.place(name, tuple(stored.shape), self._dtype)
            self._convert([stored], value)
        self._check(name, value)
        self._done(name)
        return value

    def matrix(self, place: str, weights: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        packed = self._kept([weights], biases)
        if packed is None:
            packed = self._pack_linear(self._rows(weights), self._bias(biases))
        return self._packed(place, packed, [*weights, *biases])

    def gate_up(self, place: str, gate: Part, up: Part, biases: Sequence[Part]) -> LinearWeight:
        packed = self._kept([[gate], [up]], biases)
        if packed is None:
            packed = self._pack_gate_up(self._rows([gate]), self._rows([up]), self._bias(biases))
        return self._packed(place, packed, [gate, up, *biases])

    def _kept(self, matrices: Sequence[Sequence[Part]], biases: Sequence[Part]) -> LinearWeight | None:
        """Matrices, each made of the rows of several, as they are stored; None: that is not possible."""
        if self._pack_stored is None:
            return None
        made: list[StoredMatrix] = []
        for parts in matrices:
            of_parts: list[StoredMatrix] = []
            for part in parts:
                stored = self._checkpoint.stored_matrix(part.name)
                if stored is None:
                    return None
                of_parts.append(stored.over_rows(part.of))
            one = joined(of_parts)
            if one is None:
                return None
            made.append(one)
        return self._pack_stored(made, self._bias(biases))

    def head(self, place: str, name: str, embedding: Tensor) -> LinearWeight:
        if self._checkpoint.is_done(name):
            return self._packed(place, self._pack_linear(embedding, None), [])
        return self.matrix(place, [Part(name)], [])

    def _packed(self, place: str, packed: LinearWeight, parts: Sequence[Part]) -> LinearWeight:
        if self._image is not None and self._form is not None:
            self._image.put_matrix(place, self._form.facts(packed), self._form.parts(packed))
        for name in dict.fromkeys(part.name for part in parts):
            self._done(name)
        return packed

    def _bias(self, parts: Sequence[Part]) -> Tensor | None:
        return self._rows(parts, may_be_kept=True) if parts else None

    def _rows(self, parts: Sequence[Part], *, may_be_kept: bool = False) -> Tensor:
        """The rows of one part of a tensor or of several, one below the other."""
        stored = [part.of(self._checkpoint.tensor(part.name)) for part in parts]
        packs = self._form is not None and not may_be_kept
        if packs and len(stored) == 1 and stored[0].dtype is self._dtype:
            rows = stored[0]  # packing reads it and keeps nothing: no need for a copy
        elif self._device.type == "cpu":
            rows = torch.empty(sum(map(len, stored)), *stored[0].shape[1:], dtype=self._dtype)
            self._convert(stored, rows)
        else:
            moved = [part.to(device=self._device, dtype=self._dtype, copy=True) for part in stored]
            rows = torch.cat(moved) if len(moved) > 1 else moved[0]
        for part, values in zip(parts, torch.split(rows, [len(part) for part in stored]), strict=True):
            self._check(part.name, values)
        return rows

    def _convert(self, stored: Sequence[Tensor], into: Tensor) -> None:
        """One below the other, by several threads: of torch's own there are few where kernels have theirs."""
        if into.dim() == 0:
            into.copy_(stored[0])
            return
        pieces: list[tuple[Tensor, Tensor]] = []
        step = max(1, _VALUES_AT_ONCE // max(1, into[0].numel()))
        at = 0
        for part in stored:
            for piece in torch.split(part, step):
                pieces.append((into[at : at + len(piece)], piece))
                at += len(piece)
        if len(pieces) == 1:
            into.copy_(stored[0])
            return

        def copy(pair: tuple[Tensor, Tensor]) -> None:
            with torch.inference_mode(into.is_inference()):  # which is a thread's own
                pair[0].copy_(pair[1])

        with ThreadPoolExecutor(self._threads) as pool:
            for _ in pool.map(copy, pieces):
                pass

    def _check(self, name: str, value: Tensor) -> None:
        if self._form is not None and value.dtype is torch.bfloat16:
            finite = self._form.all_finite(value)
        else:
            finite = all(bool(torch.isfinite(bound)) for bound in torch.aminmax(value))  # NaN is both bounds
        if not finite:
            dtype = str(self._dtype).removeprefix("torch.")
            raise self._checkpoint.error(name, f"holds values that are not finite numbers (in {dtype})")

    def _done(self, name: str) -> None:
        self._progress.add(self._checkpoint.done(name))
        if self._image is not None:
            self._image.tell_used()


class ImageSource:
    """Maps what was packed before."""

    def __init__(self, image: Image, form: PackedForm, dtype: torch.dtype) -> None:
        self._image, self._form, self._dtype = image, form, dtype

    def tensor(self, name: str) -> Tensor:
        return self._image.tensor(name, self._dtype)

    def matrix(self, place: str, weights: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        del weights, biases
        return self._form.restore(*self._image.matrix(place))

    def gate_up(self, place: str, gate: Part, up: Part, biases: Sequence[Part]) -> LinearWeight:
        del gate, up
        return self.matrix(place, (), biases)

    def head(self, place: str, name: str, embedding: Tensor) -> LinearWeight:
        del embedding
        return self.matrix(place, (Part(name),), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters, by their use."""

    embedding: int  # looked up
    head: int  # multiplied with the rows that are sampled; the embedding itself when `tied`
    linear: int  # of the layers
    tail: int  # of `linear`, behind the last layer's attention: only the rows that are sampled get there
    small: int  # norms and biases
    tied: bool
    stored: tuple[StoredSize, ...] = ()  # of `linear`, the matrices that are quantised in the checkpoint

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.small + (0 if self.tied else self.head)

    def memory(self, itemsize: int, kernels: KernelSet, packed_bytes: int | None = None) -> WeightMemory:
        """`packed_bytes`: what all matrices take, once that is known."""
        packed_bits = kernels.packed_bits
        if packed_bytes is None:
            usual = packed_bits or 8.0 * itemsize
            saved = sum(each.saved(kernels, usual) for each in self.stored)
            packed_bytes = int((self.linear + self.head) * usual - saved) // 8
        read = packed_bytes + self.small * itemsize
        apart = packed_bits is not None or not self.tied
        return WeightMemory(total=read + (self.embedding * itemsize if apart else 0), read=read)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMemory:
    """Bytes of loaded weights."""

    total: int
    read: int  # for one token with its logits; the embedding is looked up


def count_parameters(path: Path, model: ModelConfig) -> Parameters:
    """From the configuration, once the files' headers agree with it; left-over tensors are the loader's to judge.

    No weight is read.
    """
    shapes = expected_shapes(model)
    with open_checkpoint(path) as checkpoint:
        take_text(checkpoint, model)
        checkpoint.drop(lambda name: name not in shapes)
        checkpoint.require(shapes)
        stored = tuple(checkpoint.stored_sizes())
    table = model.vocab_size * model.hidden_size
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    small = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1)
    tables = table if model.tie_word_embeddings else 2 * table
    return Parameters(
        embedding=table,
        head=table,
        linear=matrices - tables,
        tail=sum(math.prod(shapes[name]) for name in matrices_after_attention(model, model.num_layers - 1)),
        small=small,
        tied=model.tie_word_embeddings,
        stored=stored,
    )


def rope_table(rope: RopeConfig | None, head_dim: int, num_positions: int, *, rotary_dim: int | None = None) -> Tensor:
    """[num_positions, head_dim] float32: the cosines of a position's head_dim / 2 angles, then their sines.

    Of `rotary_dim` values that are rotated, all by default; the others, and all of a layer without rope, have angles of
    zero.

    The row of a position depends on that position alone, for every RoPE type. The types are as in transformers'
    `modeling_rope_utils`: default (Su et al. 2021, arXiv:2104.09864), linear (position interpolation), llama3, yarn
    (Peng et al. 2023, arXiv:2309.00071) and dynamic NTK. The last one stretches its base with the length of the
    sequence; taken literally, a key's rotation would depend on how the prompt was cut into slices and on what shares
    the batch. Here the length that counts for position p is p + 1, which is what a model that decodes token by token
    with a KV cache sees, and which equals the reference up to the original length.
    """
    turned = head_dim if rotary_dim is None else rotary_dim
    if rope is None:
        turned, cosines, sines = 0, torch.empty(num_positions, 0), torch.empty(num_positions, 0)
    else:
        positions = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1)
        angles = positions * _frequencies(rope, turned, positions)
        amplitude = _amplitude(rope)
        cosines, sines = angles.cos() * amplitude, angles.sin() * amplitude
    kept = torch.ones(num_positions, (head_dim - turned) // 2)
    return torch.cat([cosines, kept, sines, 0.0 * kept], dim=1)


def _frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """Radians per position: [D / 2], or [P, D / 2] where they depend on the position [P, 1]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "dynamic":
        length = (positions + 1).clamp(min=rope.original_max_positions)
        stretch = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
        base = rope.theta * stretch ** (head_dim / (head_dim - 2))
        return 1.0 / (base**exponents)
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, plain)
    if rope.rope_type == "longrope":
        # Ding et al. 2024, arXiv:2402.13753. One table for all served lengths: a row does not depend on others.
        factors = rope.long_factors if len(positions) > rope.original_max_positions else rope.short_factors
        return plain / torch.tensor(factors, dtype=torch.float32)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    turns = rope.original_max_positions * plain / (2 * math.pi)  # full rotations over the original length
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, head_dim: int, plain: Tensor) -> Tensor:
    """Dimensions that turn over beta_fast times in the original length are kept, under beta_slow times divided."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    divide = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * divide + plain * (1.0 - divide)


def _amplitude(rope: RopeConfig) -> float:
    """The attention factor of YaRN and LongRoPE, which multiplies cosines and sines; 1 for the other types."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type != "yarn":
        return 1.0

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)

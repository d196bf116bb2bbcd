"""The loading of a decoder, from a checkpoint's files or from an image of packed weights.

The files hold exactly the tensors that the configuration implies, or a ModelLoadError says which do not.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire_engine.contract.kv_groups import KVLayout, one_group
from quire_engine.execution.models.checkpoint import Checkpoint, StoredTensors, open_checkpoint
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.decoder import Decoder, Weights
from quire_engine.execution.models.dequantising import decode_quantised
from quire_engine.execution.models.expert_layers import ExpertLayers
from quire_engine.execution.models.experts import (
    expert_shapes,
    is_expert,
    is_router,
    most_expert_bytes,
    take_experts,
)
from quire_engine.execution.models.experts_config import ExpertsConfig
from quire_engine.execution.models.gguf_tensors import take_gguf
from quire_engine.execution.models.matrix_parts import Part, WeightSource
from quire_engine.execution.models.rank_source import RankSource
from quire_engine.execution.models.rope import rope_table
from quire_engine.execution.models.sites import site_of
from quire_engine.execution.packed.image import ALIGNMENT, Image, ImageWriter
from quire_engine.execution.progress import Progress, Tell, tell_nobody
from quire_engine.ranks import ALONE, Rank, heads_of_rank
from quire_kernels.kernel_set import (
    Attend,
    AttentionShape,
    GateMixed,
    KeepSampled,
    KernelSet,
    LayerOp,
    LinearAdd,
    LinearWeight,
    Norm,
    NormAdd,
    NormGateUp,
    NormLinear,
    PoolPart,
    Project,
    RopeWrite,
    Source,
)
from quire_kernels.packed_form import PackedForm
from quire_kernels.stored import StoredMatrix, joined

_log = logging.getLogger(__name__)

_VALUES_AT_ONCE = 4 << 20  # that one thread converts
_HEAD = "lm_head.weight"
_HEADS = (_HEAD, "score.weight")  # the second one is a classifier's, which the server computes
EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
# Of models that see and hear too; what is left beside these and the text part is an error.
_OTHER_PARTS = (
    *("model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "model.audio_tower.", "audio_tower."),
    *("model.multi_modal_projector.", "multi_modal_projector.", "model.embed_vision.", "model.embed_audio.", "mtp."),
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
    rank: Rank = ALONE,
) -> Decoder:
    """Load `path`'s weights, converted to `dtype`, onto `device`; positions up to `max_model_len` can be computed.

    Nothing outside the directory is opened and no pickle is ever read. Raises ModelLoadError for missing, left-over,
    misshapen, unreadable or non-finite tensors, naming file and tensors.
    """
    with checked_checkpoint(path, config) as checkpoint:
        source = CheckpointSource(checkpoint, kernels, dtype, device, tell=tell, threads=threads)
        layout = one_group(heads_of_rank(config.kv_heads, rank.size))
        weights = assemble(
            source, config, kernels, layout=layout, device=device, max_model_len=max_model_len, rank=rank
        )
    return decoder_of(weights, config, kernels)


@contextmanager
def checked_checkpoint(path: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """The checkpoint's files, once they hold exactly what the configuration implies. Raises ModelLoadError."""
    with open_checkpoint(path) as checkpoint:
        take_text(checkpoint, config)
        if config.headless:
            checkpoint.drop(lambda name: name in _HEADS)
        elif config.tie_word_embeddings:  # stored once more: `with_own_head` has compared the two
            checkpoint.drop(lambda name: name == _HEAD)
        checkpoint.require(expected_shapes(config))
        yield checkpoint


def take_text(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Give the tensors of the decoder the names that they have in a model of texts alone, and forget the others'.

    Of quantised matrices the checkpoint has the decoded ones from here on.
    """
    if config.quantisation is not None and config.quantisation.method == "gguf":
        take_gguf(checkpoint, config)
    elif config.quantisation is not None:
        decode_quantised(checkpoint, config.quantisation)
    checkpoint.drop(lambda name: name.endswith(".rotary_emb.inv_freq"))  # derived, saved by old exporters
    _take_names(checkpoint, config)
    checkpoint.drop(lambda name: _is_of_more_layers(name, config))
    if config.tie_word_embeddings and not config.headless and EMBEDDING not in checkpoint.names:
        checkpoint.rename(lambda name: EMBEDDING if name == _HEAD else name)  # of the tied two the head was saved
    take_experts(checkpoint, config)


def _take_names(checkpoint: Checkpoint, config: ModelConfig) -> None:
    if "embed_tokens.weight" in checkpoint.names:  # only the part below the heads was saved
        checkpoint.rename(lambda name: name if name.startswith(("lm_head.", "score.")) else f"model.{name}")
    if config.family.text_type is None:
        return
    checkpoint.drop(lambda name: name.startswith(_OTHER_PARTS))
    prefix = next((each for each in config.family.prefixes if each + "norm.weight" in checkpoint.names), None)
    if prefix is not None:
        checkpoint.rename(lambda name: name.replace(prefix, "model.", 1) if name.startswith(prefix) else name)
    checkpoint.rename(lambda name: _HEAD if name == "language_model." + _HEAD else name)


def _is_of_more_layers(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is of layers that guess tokens further ahead, which are not computed."""
    found = _LAYER.match(name)
    more = range(config.num_layers, config.num_layers + config.more_layers)
    return config.more_layers > 0 and (name.startswith("model.mtp_") or (found is not None and int(found[1]) in more))


def decoder_of(weights: Weights, config: ModelConfig, kernels: KernelSet) -> Decoder:
    """The decoder with these weights."""
    num_parameters = sum(math.prod(shape) for shape in expected_shapes(config).values())
    return Decoder(config, weights, kernels, num_parameters=num_parameters)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    family, norms = config.family, config.family.norms
    row = family.qk_norm == "row"
    for index in range(config.num_layers):
        layer, heads = f"model.layers.{index}.", config.kv_heads[index]
        if family.layer_scalar:
            shapes[layer + "layer_scalar"] = (1,)
        for norm in (norms.attention, norms.after_attention, norms.mlp, norms.after_mlp):
            if norm is not None:
                shapes[f"{layer}{norm}.weight"] = (hidden,)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (heads.width * (config.num_heads if row else 1),)
            shapes[layer + "self_attn.k_norm.weight"] = (heads.width * (heads.number if row else 1),)
        shapes |= {layer + "self_attn.sinks": (config.num_heads,)} if family.sinks else {}
        shapes |= expert_shapes(config, index)
        for name, rows, columns, bias in _projections(config, index):
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
    return shapes


def _projections(config: ModelConfig, index: int) -> Iterator[tuple[str, int, int, bool]]:
    """Name, outputs, inputs of a layer's matrices, and whether they have a bias."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.kv_heads[index]
    q_width, kv_width = config.num_heads * heads.width, heads.values
    yield "self_attn.o_proj", hidden, q_width, config.o_bias
    if config.family.attention_gate is not None:
        yield "self_attn." + config.family.attention_gate, q_width, hidden, False
    if "qkv" in config.family.fused:
        yield "self_attn.qkv_proj", q_width + 2 * kv_width, hidden, config.qkv_bias
    else:
        yield "self_attn.q_proj", q_width, hidden, config.qkv_bias
        for name in ("k_proj",) if config.keys_are_values(index) else ("k_proj", "v_proj"):
            yield "self_attn." + name, kv_width, hidden, config.qkv_bias
    if not config.has_mlp(index):
        return
    yield "mlp.down_proj", hidden, inner, config.mlp_bias
    if "gate_up" in config.family.fused:
        yield "mlp.gate_up_proj", 2 * inner, hidden, config.mlp_bias
    else:
        for name in ("gate_proj", "up_proj"):
            yield "mlp." + name, inner, hidden, config.mlp_bias


def most_image_bytes(config: ModelConfig, form: PackedForm, itemsize: int) -> int:
    """An upper bound on the bytes of a model's image: matrices packed, the embedding, norms and biases as they are."""
    total = config.vocab_size * config.hidden_size * itemsize + ALIGNMENT
    total += most_expert_bytes(config, form)
    for name, shape in expected_shapes(config).items():
        if is_expert(name):
            continue
        plain = len(shape) == 1 or is_router(name)
        total += math.prod(shape) * max(itemsize, 4) + ALIGNMENT if plain else form.most_bytes(*shape)
    for index, heads in enumerate(config.kv_heads):
        if config.keys_are_values(index):  # the rows of the keys are packed twice
            total += form.most_bytes(heads.values, config.hidden_size)
    return total


def matrices_after_attention(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Names of a layer's matrices that are multiplied with what its attention gives."""
    prefix, names = f"model.layers.{layer}.", ["self_attn.o_proj"]
    if config.family.attention_gate is not None:
        names.append("self_attn." + config.family.attention_gate)
    if config.has_mlp(layer):
        names += ["mlp.gate_up_proj"] if "gate_up" in config.family.fused else ["mlp.gate_proj", "mlp.up_proj"]
        names.append("mlp.down_proj")
    of_experts = (name for name, shape in expert_shapes(config, layer).items() if len(shape) > 1)
    return (*(f"{prefix}{name}.weight" for name in names), *of_experts)


def with_own_head(path: Path, config: ModelConfig) -> ModelConfig:
    """The configuration without tied embeddings if the files have a head that differs from the embedding.

    Transformers computes with such a head, whatever config.json says. Raises ModelLoadError.
    """
    if config.headless or not config.tie_word_embeddings:
        return config
    if config.quantisation is not None and config.quantisation.method == "gguf":  # which ties those without a head
        return config
    with open_checkpoint(path) as checkpoint:
        take_text(checkpoint, config)
        if not {EMBEDDING, _HEAD} <= checkpoint.names:
            return config
        is_own = not torch.equal(checkpoint.tensor(_HEAD), checkpoint.tensor(EMBEDDING))
        for name in (EMBEDDING, _HEAD):
            checkpoint.release(name)
    if is_own:
        _log.warning("%s: %s differs from the embedding and is used, although config.json ties them", path, _HEAD)
    return replace(config, tie_word_embeddings=not is_own)


def assemble(
    source: WeightSource,
    config: ModelConfig,
    kernels: KernelSet,
    *,
    layout: KVLayout,
    device: torch.device,
    max_model_len: int,
    rank: Rank = ALONE,
) -> Weights:
    """The decoder's weights from wherever they come, for a pool of this layout, which is the rank's."""
    if kernels.is_divided:
        source = RankSource(source, config, kernels, rank)
    tied, table = config.tie_word_embeddings, source.stored_table("embedding", EMBEDDING)
    embedding = source.tensor(EMBEDDING) if table is None else None
    # The largest matrix comes while little else is in memory: what packing needs beside the weights is then a layer.
    head = table if tied and table is not None else source.head("head", EMBEDDING if tied else _HEAD, embedding)
    layers = _Layers(source, config, kernels, layout, device=device, max_model_len=max_model_len, rank=rank)
    return Weights(
        embedding=embedding,
        program=tuple(op for index in range(config.num_layers) for op in layers.ops(index)),
        parts=pool_parts(layout),
        final_norm=layers.norm(_FINAL_NORM),
        head=head,
        stored_embedding=table,
    )


def pool_parts(layout: KVLayout) -> tuple[PoolPart, ...]:
    """The parts of a pool of this layout, as kernels take them."""
    found: list[PoolPart] = []
    for part in layout.parts:
        before = tuple(found) if len(layout.windows) == 1 else ()
        found.append(PoolPart(part.num_layers, part.heads.number, part.heads.width, before))
    return tuple(found)


class _Layers:
    """Makes the ops of a model's layers from its configuration and its weights."""

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        kernels: KernelSet,
        layout: KVLayout,
        *,
        device: torch.device,
        max_model_len: int,
        rank: Rank,
    ) -> None:
        self._source, self._config, self._layout, self._rank = source, config, layout, rank
        self._experts = ExpertLayers(source, config, kernels, self.norm)
        widths = [heads.width for heads in config.kv_heads]
        self._orders = {width: pair_order(config, width) for width in set(widths)}
        self._tables = {
            (rope, width): rope_table(rope, width, max_model_len, rotary_dim=config.rotary_dim(width)).to(device)
            for rope, width in dict.fromkeys(zip(config.ropes, widths, strict=True))
        }

    def ops(self, index: int) -> Iterator[LayerOp]:
        """Yield one layer's ops; those behind the last layer's keys and values are for the sample rows alone."""
        config, norms = self._config, self._config.family.norms
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        norm = self._norm_at(prefix, norms.attention)
        yield NormLinear(norm=norm, weight=self._qkv(index, prefix), site=site_of(index, "qkv"))
        shape, place = self._shape(index, attention), self._layout.places[index]
        rope = self._tables[config.ropes[index], shape.head_dim]
        yield RopeWrite(shape=shape, rope=rope, layer=place.layer, group=place.group, part=place.part)
        if index == config.num_layers - 1:
            yield KeepSampled()
        attend = Attend(shape=shape, layer=place.layer, group=place.group, part=place.part)
        o = self._matrix(prefix + "o", [Part(attention + "o_proj")], config.o_bias)
        if config.family.parallel:  # the MLP reads x before attention is added to it
            yield self._norm_gate_up(index, norm)
            yield attend
            yield from self._add("mixed", o, None, site=site_of(index, "o"))
        else:
            yield attend
            if config.family.attention_gate is not None:
                gate = self._matrix(prefix + "attention_gate", [Part(attention + config.family.attention_gate)], False)
                yield GateMixed(norm=norm, weight=gate)
            yield from self._add("mixed", o, self._norm_at(prefix, norms.after_attention), site=site_of(index, "o"))
            norm = self._norm_at(prefix, norms.mlp)
            if config.experts is not None and config.has_experts(index):
                yield from self._with_experts(index, config.experts, norm)
                return
            yield self._norm_gate_up(index, norm)
        after = self._norm_at(prefix, norms.after_mlp)
        yield from self._add("wide", self._down(index), after, self._scalar(prefix), site=site_of(index, "down"))

    def _with_experts(self, index: int, known: ExpertsConfig, norm: Norm | None) -> Iterator[LayerOp]:
        """Yield the ops that follow attention in a layer with experts."""
        prefix = f"model.layers.{index}."
        after = self._norm_at(prefix, self._config.family.norms.after_mlp)
        if after is None or not self._config.has_mlp(index):
            yield from self._experts.ops(index, known, norm, after)
            return
        yield self._norm_gate_up(index, norm)
        yield Project(source="wide", weight=self._down(index), site=site_of(index, "down"))
        yield from self._experts.ops_beside(index, known, after, self._scalar(prefix))

    def _down(self, index: int) -> LinearWeight:
        prefix = f"model.layers.{index}."
        return self._matrix(prefix + "down", [Part(prefix + "mlp.down_proj")], self._config.mlp_bias)

    def _scalar(self, prefix: str) -> float:
        """The number by which a layer's result is multiplied."""
        return self._source.tensor(prefix + "layer_scalar").item() if self._config.family.layer_scalar else 1.0

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

    def _add(
        self, source: Source, weight: LinearWeight, norm: Norm | None, scale: float = 1.0, *, site: int
    ) -> Iterator[LayerOp]:
        """The projection is added to the residual stream at once, or normed first; then the sum is scaled."""
        if norm is None:
            yield LinearAdd(source=source, weight=weight, scale=self._config.residual_scale, site=site)
        else:
            yield Project(source=source, weight=weight, site=site)
            yield NormAdd(norm=norm, scale=scale)

    def _shape(self, index: int, attention: str) -> AttentionShape:
        config, heads = self._config, self._config.kv_heads[index]
        own, own_kv = (self._rank.heads(number) for number in (config.num_heads, heads.number))
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm, k_norm = (
                self._head_norm(f"{attention}{name}.weight", heads.width) for name in ("q_norm", "k_norm")
            )
            if config.family.qk_norm == "row":
                q_norm, k_norm = (
                    norm.view(-1, heads.width)[part].flatten() for norm, part in ((q_norm, own), (k_norm, own_kv))
                )
        return AttentionShape(
            num_heads=own.stop - own.start,
            num_kv_heads=own_kv.stop - own_kv.start,
            head_dim=heads.width,
            scale=config.attention_scale,
            window=config.windows[index],
            bidirectional=config.bidirectional,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=config.family.v_norm,
            norm_eps=config.norm_eps,
            softcap=config.score_cap,
            sinks=self._source.tensor(attention + "sinks").float()[own] if config.family.sinks else None,
        )

    def _head_norm(self, name: str, width: int) -> Tensor:
        """[width], or of a row of heads, in the order of the values that it multiplies."""
        weight, order = self._norm_weight(name), self._orders[width]
        return weight if order is None else weight.view(-1, width)[:, order].flatten()

    def _qkv(self, index: int, prefix: str) -> LinearWeight:
        return self._matrix(prefix + "qkv", qkv_parts(self._config, index), self._config.qkv_bias)

    def _norm_gate_up(self, index: int, norm: Norm | None) -> NormGateUp:
        gate, up = gate_up_parts(self._config, index)
        biases = [part.named(".bias") for part in (gate, up)] if self._config.mlp_bias else []
        place = f"model.layers.{index}.gate_up"
        weight = self._source.gate_up(place, [gate.named(".weight")], [up.named(".weight")], biases)
        return NormGateUp(norm=norm, weight=weight, activation=self._config.activation, site=site_of(index, "gate_up"))

    def _matrix(self, place: str, parts: Sequence[Part], bias: bool) -> LinearWeight:
        weights, biases = ([part.named(kind) for part in parts] for kind in (".weight", ".bias"))
        return self._source.matrix(place, weights, biases if bias else [])


def pair_order(config: ModelConfig, width: int) -> Tensor | None:
    """[width]: the stored places of a head's values, so that what rotates together lies half a head apart.

    None: they lie so. Values that do not rotate are paired with each other and meet angles of zero.
    """
    turned = config.rotary_dim(width)
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


def qkv_parts(config: ModelConfig, index: int) -> list[Part]:
    """The stored rows of a layer's queries, keys and values, one below the other."""
    attention, heads = f"model.layers.{index}.self_attn.", config.kv_heads[index]
    order = pair_order(config, heads.width)
    if "qkv" not in config.family.fused:
        parts = [Part(attention + name, head_order=order) for name in ("q_proj", "k_proj")]
        return [*parts, Part(attention + ("k_proj" if config.keys_are_values(index) else "v_proj"))]
    if order is None:
        return [Part(attention + "qkv_proj")]
    rotated = config.num_heads * heads.width + heads.values
    return [
        Part(attention + "qkv_proj", stop=rotated, head_order=order),
        Part(attention + "qkv_proj", start=rotated),
    ]


def gate_up_parts(config: ModelConfig, index: int) -> tuple[Part, Part]:
    """The stored rows of a layer's gate and of its up projection."""
    mlp = f"model.layers.{index}.mlp."
    if "gate_up" in config.family.fused:
        inner = config.intermediate_size
        return Part(mlp + "gate_up_proj", stop=inner), Part(mlp + "gate_up_proj", start=inner)
    return Part(mlp + "gate_proj"), Part(mlp + "up_proj")


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
        self._keeps_experts = kernels.stored_experts
        self._keeps_tables = self._pack_stored is not None and kernels.embed_stored is not None
        phase = "reading weights" if self._form is None else "packing weights"
        self._progress = Progress(phase, checkpoint.num_bytes, tell)

    def tensor(self, name: str, *, wide: bool = False) -> Tensor:
        stored, dtype = self._checkpoint.tensor(name), torch.float32 if wide else self._dtype
        if self._image is None:
            # Always a copy: the file may be replaced while we serve, and its mapping would follow.
            value = stored.to(device=self._device, dtype=dtype, copy=True)
        else:
            value = self._image.place(name, tuple(stored.shape), dtype)
            self._convert([stored], value)
        self._check(name, value)
        self._done(name)
        return value

    def matrix(self, place: str, weights: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        packed = self._kept([weights], biases)
        if packed is None:
            packed = self._pack_linear(self._rows(weights), self._bias(biases))
        return self._packed(place, packed, [*weights, *biases])

    def gate_up(self, place: str, gate: Sequence[Part], up: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        packed = self._kept([gate, up], biases)
        if packed is None:
            packed = self._pack_gate_up(self._rows(gate), self._rows(up), self._bias(biases))
        return self._packed(place, packed, [*gate, *up, *biases])

    def _kept(self, matrices: Sequence[Sequence[Part]], biases: Sequence[Part]) -> LinearWeight | None:
        """Matrices, each made of the rows of several, as they are stored; None: that is not possible."""
        filled = any(part.filled for parts in matrices for part in parts)
        if self._pack_stored is None or (filled and not self._keeps_experts):
            return None
        made: list[list[StoredMatrix]] = []
        for parts in matrices:
            of_parts: list[StoredMatrix] = []
            for part in parts:
                stored = self._checkpoint.stored_matrix(part.name)
                if stored is None:
                    return None
                of_parts.append(stored.over_rows(part.filled_rows))
            if any(part.filled for part in parts):  # experts, whose matrices all have one form
                whole = joined(of_parts)
                if whole is None:
                    return None
                of_parts = [whole]
            made.append([each.to(self._device) for each in of_parts])
        return self._pack_stored(made, self._bias(biases))

    def stored_table(self, place: str, name: str) -> LinearWeight | None:
        stored = self._checkpoint.stored_matrix(name) if self._keeps_tables else None
        if stored is None or stored.zero_points is not None:
            return None
        packed = self._kept([[Part(name)]], [])
        return None if packed is None else self._packed(place, packed, [Part(name)])

    def head(self, place: str, name: str, embedding: Tensor | None, rows: slice | None = None) -> LinearWeight:
        part = Part(name) if rows is None else Part(name, start=rows.start, stop=rows.stop)
        if embedding is None or not self._checkpoint.is_done(name):
            return self.matrix(place, [part], [])
        packed = self._kept([[part]], [])
        return self._packed(place, self._pack_linear(part.of(embedding), None) if packed is None else packed, [])

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
        stored: list[Tensor] = []
        names: list[str] = []
        for part in parts:
            pieces = part.pieces(self._checkpoint.tensor(part.name))
            stored += pieces
            names += [part.name] * len(pieces)
        packs = self._form is not None and not may_be_kept
        if packs and len(stored) == 1 and stored[0].dtype is self._dtype:
            rows = stored[0]  # packing reads it and keeps nothing: no need for a copy
        elif self._device.type == "cpu":
            rows = torch.empty(sum(map(len, stored)), *stored[0].shape[1:], dtype=self._dtype)
            self._convert(stored, rows)
        else:
            moved = [part.to(device=self._device, dtype=self._dtype, copy=True) for part in stored]
            rows = torch.cat(moved) if len(moved) > 1 else moved[0]
        for name, values in zip(names, torch.split(rows, [len(part) for part in stored]), strict=True):
            self._check(name, values)
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

        with ThreadPoolExecutor(self._threads, "weights") as pool:
            for _ in pool.map(copy, pieces):
                pass

    def _check(self, name: str, value: Tensor) -> None:
        if self._form is not None and value.dtype is torch.bfloat16:
            finite = self._form.all_finite(value)
        else:
            finite = all(bool(torch.isfinite(bound)) for bound in torch.aminmax(value))  # NaN is both bounds
        if not finite:
            dtype = str(value.dtype).removeprefix("torch.")
            raise self._checkpoint.error(name, f"holds values that are not finite numbers (in {dtype})")

    def _done(self, name: str) -> None:
        self._progress.add(self._checkpoint.done(name))
        if self._image is not None:
            self._image.tell_used()


class ImageSource:
    """Maps what was packed before."""

    def __init__(self, image: Image, form: PackedForm, dtype: torch.dtype) -> None:
        self._image, self._form, self._dtype = image, form, dtype

    def tensor(self, name: str, *, wide: bool = False) -> Tensor:
        return self._image.tensor(name, torch.float32 if wide else self._dtype)

    def matrix(self, place: str, weights: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        del weights, biases
        return self._form.restore(*self._image.matrix(place))

    def gate_up(self, place: str, gate: Sequence[Part], up: Sequence[Part], biases: Sequence[Part]) -> LinearWeight:
        del gate, up
        return self.matrix(place, (), biases)

    def stored_table(self, place: str, name: str) -> LinearWeight | None:
        del name
        return self._form.restore(*self._image.matrix(place)) if self._image.has_matrix(place) else None

    def head(self, place: str, name: str, embedding: Tensor | None, rows: slice | None = None) -> LinearWeight:
        del embedding, rows  # an image has whole matrices
        return self.matrix(place, (Part(name),), ())

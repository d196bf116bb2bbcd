"""The record of model operations that one implementation provides, and the inputs of the operations.

Promises: the model calls these ops and no others; `reference` (plain torch) is the specification of each. On a CPU
every output row is computed in an order that does not depend on the other rows of the call (batch invariance). Must not
know: the engine, the server, models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from quire_kernels.activations import Activation
from quire_kernels.low_rank import LowRank, LowRankExperts, LowRankMatrix, PlacedOps
from quire_kernels.packed_form import PackedForm
from quire_kernels.ranks import Collective
from quire_kernels.stored import StoredKind, StoredMatrix

# Weight formats of the C++ kernels: 8 bits per value, or 4 with a scale for every 32.
Quantization = Literal["int8", "int4"]
# Types of the KV pool: the model's dtype, or int8 or fp8 (e4m3) with a scale for every token and head.
KVType = Literal["auto", "int8", "fp8"]
# Where a CPU fetches what a step reads once, such as the weights of a step of one row.
Fetch = Literal["past caches", "second level"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """The properties of a KV pool that an implementation must support."""

    head_dim: int
    block_size: int  # tokens
    kv_type: KVType = "auto"


class AttentionInput(Protocol):
    """The description of a step for attention: B sequences, T = sum of their query rows."""

    @property
    def positions(self) -> Tensor: ...  # [T] int64, absolute position of each row
    @property
    def kv_slots(self) -> Tensor: ...  # [T] int64, block_id * block_size + offset, where each row's K/V is written
    @property
    def query_starts(self) -> Tensor: ...  # [B + 1] int32, row offsets of the sequences
    @property
    def context_lens(self) -> Tensor: ...  # [B] int32, tokens present after this step (query rows included)
    @property
    def block_tables(self) -> Tensor: ...  # [B, M] int32, padded with 0
    @property
    def query_lens(self) -> Sequence[int]: ...  # B query row counts, on the host: planning must not wait for a device
    @property
    def kv_lens(self) -> Sequence[int]: ...  # B, context_lens on the host
    @property
    def max_query_len(self) -> int: ...
    @property
    def max_context_len(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRows:
    """An `AttentionInput` made of values, for the layers of the pool's first group and for the others."""

    positions: Tensor
    kv_slots: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    max_query_len: int
    max_context_len: int
    others: tuple[AttentionRows, ...] = ()  # the same rows in the other groups' blocks: other slots, other tables

    @property
    def num_groups(self) -> int:
        return 1 + len(self.others)

    def in_group(self, group: int) -> AttentionRows:
        """The rows as the layers of one group see them."""
        return self.others[group - 1] if group else self


class GroupedInput(AttentionInput, Protocol):
    """The rows of a step for all layers. The keys and values of each group of layers lie in blocks of their own."""

    @property
    def num_groups(self) -> int: ...
    def in_group(self, group: int) -> AttentionInput:
        """The rows as the layers of one group see them; the first group's are the input itself."""
        ...


class StepInput(GroupedInput, Protocol):
    """A step, and the S of its T rows whose output of the last layer is needed."""

    @property
    def sample_rows(self) -> Tensor: ...  # [S] int64, ascending
    @property
    def sampled(self) -> GroupedInput | None: ...  # the same B sequences with those rows alone; None: with all T


class PoolPart(NamedTuple):
    """The layers of a pool's blocks whose heads are alike."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    before: tuple[PoolPart, ...] = ()  # the parts of the same block that lie before it


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The constants of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a row at position p sees positions p - window + 1 .. p
    # A row sees what is behind it too: p - window + 1 .. p + window - 1, as far as the sequence goes after this step.
    bidirectional: bool = False  # on a CPU only
    q_norm: Tensor | None = None  # [head_dim], RMS norm of each query head; [num_heads * head_dim]: of all together
    k_norm: Tensor | None = None  # [head_dim], or [num_kv_heads * head_dim]
    v_norm: bool = False  # each value head is divided by the root of its mean square, without a weight
    norm_eps: float = 1e-6
    softcap: float | None = None  # scores s, already scaled, become softcap * tanh(s / softcap)
    sinks: Tensor | None = None  # [num_heads] float32, of each query head one more score, whose value is zero

    @property
    def row_norms(self) -> bool:
        """Whether q and k are each normed as one row."""
        return self.q_norm is not None and self.q_norm.numel() == self.num_heads * self.head_dim != self.head_dim


# How logits become experts' scores.
Scoring = Literal["softmax", "sigmoid"]


class Norm(NamedTuple):
    """An RMS norm, x / sqrt(mean(x^2) + eps) * weight; or with `centred` a layer norm, of x - mean(x).

    A weight of x's dtype multiplies the rounded quotient (Llama, Qwen); a float32 weight multiplies before the only
    rounding (Gemma, whose checkpoints hold weight - 1, OLMo, and Cohere, whose norms are centred).
    """

    weight: Tensor  # [H]
    eps: float
    centred: bool = False


# A weight matrix in the implementation's form (packed, quantised, or unchanged). Opaque to the model.
LinearWeight = Any
# Each expert's rows are filled up to a multiple of this with zeros, so that an expert begins where packed panels do.
EXPERT_ROWS = 64


def expert_rows(rows: int) -> int:
    """The rows that an expert takes in a matrix of all of them.

    >>> expert_rows(64), expert_rows(65)
    (64, 128)
    """
    return -(-rows // EXPERT_ROWS) * EXPERT_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a row's experts are chosen, and what they weigh.

    The scores s are the softmax of a row's logits z, or their sigmoid. The `top_k` experts with the largest s +
    selection_bias are chosen, or without such a bias and without groups those with the largest z; of equals the lower
    index. With groups only the experts of `kept_groups` of them can be: of those whose `best_of_group` largest values
    have the largest sum, of equals the lower (DeepSeek-V3, arXiv:2412.19437; with one value DeepSeek-V2,
    arXiv:2405.04434). The chosen weigh s, divided where `normalised` by its sum over them, which is added up in the
    order of their ranks, is at least `least_sum`, and to which `epsilon` is added; times `scale`, times the expert's
    own scale; all of it in float32. A softmax of the chosen logits alone is the normalised one of all.
    """

    weight: LinearWeight  # H -> E, from `pack_router`
    top_k: int
    scoring: Scoring = "softmax"
    normalised: bool = True
    scale: float = 1.0
    selection_bias: Tensor | None = None  # [E] float32
    groups: int = 1  # of experts that follow each other, equally many in each
    kept_groups: int = 1
    best_of_group: int = 2
    least_sum: float = 0.0
    epsilon: float = 0.0
    expert_scales: Tensor | None = None  # [E] float32
    norm: Norm | None = None  # of the router's own rows; None: it reads those that the experts read

    def check(self, count: int) -> None:
        """ValueError unless `count` experts can be chosen from so."""
        if not 0 < self.top_k <= count:
            raise ValueError(f"{self.top_k} of {count} experts cannot be chosen")
        size = count // max(1, self.groups)
        if self.groups < 1 or size * self.groups != count or not 0 < self.kept_groups <= self.groups:
            raise ValueError(f"{self.kept_groups} of {self.groups} groups of {count} experts cannot be kept")
        if self.groups > 1 and not 0 < self.best_of_group <= min(2, size):
            raise ValueError(f"the best {self.best_of_group} of a group of {size} experts cannot be added up")
        if self.top_k > self.kept_groups * size:
            raise ValueError(f"{self.top_k} experts are not in {self.kept_groups} groups of {size}")
        for name, values in (("selection bias", self.selection_bias), ("experts' scales", self.expert_scales)):
            if values is not None and (
                values.dtype is not torch.float32 or values.shape != (count,) or not values.is_contiguous()
            ):
                raise ValueError(f"the {name} must be contiguous float32 [{count}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrices:
    """The experts of one layer: down(activation(gate) * up), each with its biases.

    Two matrices hold all of them, one below the other, each with `expert_rows` of its rows.
    """

    count: int  # E
    inner: int  # I
    gate_up: LinearWeight  # H -> [E * expert_rows(I)], a gate-up pair
    down: LinearWeight  # I -> [E * expert_rows(H)]
    activation: Activation


# The ops of a layer as records, in the order of a program. Every interpreter has the same few buffers: x [T, H], the
# residual stream; wide, the last projection from x; q, the rotated queries; mixed, attention's output; y [T, H], a
# projection that is normed before it is added; held [T, H], the sum of such, which is normed again.
Source = Literal["mixed", "wide"]


# A sequence of what an adapter adds at each site of a program, `LowRank | None`, in the implementation's form.
AdapterSites = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Addend:
    """The addend of the product of T rows, before activation and residual, by each row's adapter, if it has one."""

    # [T] int32, the place of each row's adapter in `matrices`, or where that is one of `Places` among these; -1: none
    slots: Tensor
    matrices: tuple[LowRank | None, ...]  # of this product; None: the adapter leaves it as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdapters:
    """The adapters of a step's rows, for all products."""

    slots: Tensor  # [T] int32, the place of each row's adapter in `adapters`; -1: it has none
    adapters: tuple[AdapterSites, ...]  # or (Places,), whose places `slots` are

    def at(self, site: int | None) -> Addend | None:
        """The addend at one site; None: no row has any."""
        if site is None:
            return None
        matrices = tuple([adapter[site] for adapter in self.adapters])
        return None if all(matrix is None for matrix in matrices) else Addend(slots=self.slots, matrices=matrices)

    def of_rows(self, rows: Tensor) -> StepAdapters:
        """Return the adapters of some of the step's rows alone."""
        return StepAdapters(slots=self.slots[rows], adapters=self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedOps:
    """The products of a kernel set with what adapters add to their rows.

    A row without an adapter has the bits of the op of the same name in `KernelSet`. For another row h = (A x) * scale
    and B h are float32, and B h is added to the projection with its bias before the next rounding; a set that has
    `placed` may round the projection first. Each of a row's sums has an order of its own, whatever the other rows and
    their adapters are.

    pack(matrix) -> LowRank
        Copies what it needs.
    bind(sites) -> AdapterSites
        All of an adapter, by site.
    num_bytes(low_rank) -> int
        Of memory; at most `itemsize` bytes for each value of A and B.
    pack_experts(experts) -> LowRank, or None
        Of all experts of a layer. None: what adapts experts is refused.
    mix_experts(x, norm, routing, experts, scale, residual, above, below) -> [T, H], or None
        The op of the same name; `above` is the addend of each row's experts' gate and up, `below` that of their down,
        each None where no row has any.
    placed
        For sets that compute steps on a device by themselves: addends are of `Places`, and nothing else is packed.
    told(adapter sites) -> tensors, and restored(tensors) -> AdapterSites, or None
        The same adapter in another process that computes with this one; for sets that have `join`.
    """

    pack: Callable[[LowRankMatrix], LowRank]
    bind: Callable[[Sequence[LowRank | None]], AdapterSites]
    num_bytes: Callable[[LowRank], int]
    itemsize: int
    norm_linear: Callable[[Tensor, Norm | None, LinearWeight, Addend], Tensor]
    norm_gate_up: Callable[[Tensor, Norm | None, LinearWeight, Activation, Addend], Tensor]
    linear_add: Callable[[Tensor, LinearWeight, Tensor, float, Addend], Tensor]
    pack_experts: Callable[[LowRankExperts], LowRank] | None = None
    mix_experts: Callable[..., Tensor] | None = None
    placed: PlacedOps | None = None
    told: Callable[[AdapterSites], tuple[Tensor, ...]] | None = None
    restored: Callable[[Sequence[Tensor]], AdapterSites] | None = None


class ExpertRows(NamedTuple):
    """Rows of a mixture of experts behind its first products."""

    within: Tensor  # [T * k, I]: activation(gate) * up of rows and experts, by expert
    facts: Any  # the choice, and how `within` is ordered; opaque


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertHalves:
    """`mix_experts` in two ops, for ranks that compute some columns of each expert's matrices and gather them between.

    first(x [T, H], norm, routing, experts) -> ExpertRows, of `experts.inner` columns
    second(ExpertRows with all columns, experts, scale, residual [T, N] | None, N) -> [T, N]
        The N columns that `experts.down` gives: it has [E * expert_rows(N)] rows.
    """

    first: Callable[[Tensor, Norm | None, Routing, ExpertMatrices], ExpertRows]
    second: Callable[[ExpertRows, ExpertMatrices, float, Tensor | None, int], Tensor]


# In the records of products, `site` is the number by which adapters know the product; None: none adds to it.
@dataclass(frozen=True, slots=True, kw_only=True)
class NormLinear:
    """wide = the projection of the normed x, with its bias: Q, K and V of every row."""

    norm: Norm | None
    weight: LinearWeight
    site: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NormGateUp:
    """wide = activation(gate) * up of the normed x."""

    norm: Norm | None
    weight: LinearWeight
    activation: Activation
    site: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeWrite:
    """q = the queries of wide, normed and rotated; keys and values go to the pool."""

    shape: AttentionShape
    rope: Tensor  # [P, D] float32
    layer: int  # of the part of the group's blocks
    group: int = 0  # of layers, in the pool
    part: int = 0  # of the group's blocks


@dataclass(frozen=True, slots=True)
class KeepSampled:
    """The mark behind the last keys and values: q and x have only the step's sample rows from there on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """mixed = attention of q over the pool."""

    shape: AttentionShape
    layer: int
    group: int = 0
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateMixed:
    """mixed = mixed * sigmoid(the projection of the normed x): attention's output gate.

    Its rows are those that are left: x is what attention's projections read, until attention is added to it.
    """

    norm: Norm | None
    weight: LinearWeight  # H -> Hq * D


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAdd:
    """x = x + scale * the projection of `source`; or y, from wide alone."""

    source: Source
    weight: LinearWeight
    scale: float = 1.0
    site: int | None = None
    to: Literal["x", "y"] = "x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """y = the projection of `source`."""

    source: Source
    weight: LinearWeight
    site: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateWide:
    """wide = wide * sigmoid(the one value that `weight` gives for the normed x): the gate of an expert of all rows."""

    norm: Norm | None
    weight: LinearWeight  # H -> 1, from `pack_router`


@dataclass(frozen=True, slots=True, kw_only=True)
class NormHold:
    """held = the normed y; with `adds`, held + that."""

    norm: Norm
    adds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NormAdd:
    """x = (x + the normed `source`) * scale."""

    norm: Norm
    scale: float = 1.0
    source: Literal["y", "held"] = "y"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixExperts:
    """x = x + scale * the weighted sum of the experts of the normed x; or y = that sum, which is normed and added."""

    norm: Norm | None
    routing: Routing
    experts: ExpertMatrices
    scale: float = 1.0
    to: Literal["x", "y"] = "x"
    site: int | None = None  # of gate and up; down's is the next


LayerOp = (
    NormLinear
    | NormGateUp
    | RopeWrite
    | KeepSampled
    | Attend
    | GateMixed
    | LinearAdd
    | Project
    | NormAdd
    | MixExperts
    | GateWide
    | NormHold
)


class BoundLayers(Protocol):
    """All layers of one model as one op."""

    def __call__(
        self, x: Tensor, kv: Sequence[Tensor], step: StepInput, adapters: StepAdapters | None = None
    ) -> Tensor:
        """x [T, H], the parts of the pool -> the sampled rows [S, H] after the last layer. May reuse x's memory."""
        ...


class BoundDecodes(Protocol):
    """The layers of one model for steps of decodes."""

    def __call__(self, x: Tensor, kv: Sequence[Tensor], step: StepInput) -> Tensor | None:
        """x [T, H], the parts of the pool -> the rows [T, H] after the last layer, in x's memory.

        None: nothing was done, as the step is not one of theirs.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceRows:
    """The parameters of R tokens to choose, in device memory; flags on the host tell which parameters any row uses.

    A stage that no row uses is not launched; that changes no row's token.
    """

    logits_rows: Tensor  # [R] int64, the row of logits of each; several may share one
    temperature: Tensor  # [R] float32; 0: the greatest logit
    top_k: Tensor  # [R] int32; 0, or the vocabulary: all
    top_p: Tensor  # [R] float64; 1: all
    min_p: Tensor  # [R] float32; 0: all
    seed: Tensor  # [R] int64, bits modulo 2^64
    choice: Tensor  # [R] int64
    position: Tensor  # [R] int64, of the token to choose
    draws: bool  # some temperature is not 0
    limits_k: bool
    limits_p: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSet:
    """The ops of a model. T rows, H hidden, K in, N out, D head_dim; activations in the model's dtype.

    pack_linear(weight [N, K], bias [N] | None) -> LinearWeight
        Called once per matrix at load. May keep `weight` or copy it.
    pack_gate_up(gate [I, K], up [I, K], bias [2 I] | None) -> LinearWeight
        The bias is the gate's, then up's.
    pack_stored(matrices, bias [N] | None) -> LinearWeight | None, or None
        A matrix as others quantised it (stored.py), or gate and up, each as rows one below the other that may be
        quantised in different ways, without a change of its numbers. None: there is no form for it, so that it is
        decoded and packed as any other.
    stored_bits(matrix's kind, group_size, columns, beside) -> float | None, or None
        Of a value; None: there is no form for it. `beside`: the bits of a group beside its codes; None: at most, of a
        scale and a zero point. Without it such matrices take no less memory than others, so that a model is loaded with
        decoded ones.
    embed(table [V, H], ids [T] int64) -> [T, H]
    embed_stored(w, ids [T] int64) -> [T, K], or None
        Rows of a matrix [N, K] of pack_stored that has no zero points: its numbers, rounded once. None: it computes no
        such, so that an embedding is decoded.
    norm_linear(x [T, K], norm, w) -> [T, N]
        The norm, None for none, then the projection with its bias. For QKV.
    norm_gate_up(x [T, K], norm, w, activation) -> [T, I]
        activation(gate) * up of the normed rows.
    linear_add(x [T, K], w, residual [T, N], scale) -> [T, N]
        residual + scale * projection. For O and down. May reuse residual's memory.
    norm_add(y [T, N], norm, residual [T, N], scale) -> [T, N]
        (residual + the normed y) * scale. May reuse residual's memory.
    mul_sigmoid(x [T, N], gate [T, N]) -> [T, N]
        x / (1 + exp(-gate)), rounded once. May reuse x's memory.
    rope_write(qkv [T, (Hq + 2 Hkv) * D], rope [P, D] float32, shape, kv, layer, step) -> q [T, Hq, D]
        Norms q and k if the shape has norms, by head or row, rotates both by the row's position (rope[p] is
        cos(0..D/2) then sin(0..D/2), half-split "neox" pairing), writes K and V to the row's slot, returns q.
    attention(q [T, Hq, D], shape, kv, layer, step) -> [T, Hq * D]
        Attention of every row over its sequence's positions in the paged pool, causal unless the shape says otherwise.
        All rows' K and V are written before. So rows of one sequence may come as sequences of one row each, with the
        same blocks and rising context lengths, as those of guessed tokens do on a GPU.
    linear(x [T, K], w, wide) -> [T, N], or None
        The projection with its bias alone, float32 where `wide`, else in x's dtype. None: `linear_add` to zeros.
    pack_router(weight [E, H], bias [E] | None) -> LinearWeight
        Of the numbers as they are, also where other matrices are quantised, and where the weight is float32 and the
        rows are narrower.
    route(x [T, H], routing, count) -> (logits [T, E] float32, index [T, k] int64, weights [T, k] float32)
        The choice of `mix_experts` among `count` experts, best first.
    mix_experts(x [T, H], norm, routing, experts, scale, residual [T, H] | None) -> [T, H]
        residual + scale * the sum of the experts that `routing` chooses for the normed row, each rounded and times its
        weight, in float32 in the order of their ranks; rounded once. May reuse residual's memory. residual None: the
        sum alone, without the scale. The router's logits are float32.
    given_experts(x [T, H], index [T, k] int64, weights [T, k] float32, experts) -> [T, H]
        The sum of experts chosen elsewhere; an index that is no expert's adds nothing.
    gate_rows(x [T, H], norm, w, wide [T, N]) -> [T, N]
        wide * sigmoid(w of the normed x), one float32 value a row; rounded once. May reuse wide's memory. `w` from
        `pack_router`.
    attention_scratch(num_sequences, max_context_len, num_heads, head_dim) -> int, or None
        Maximum size in bytes of an attention call's temporary memory, for the memory plan. None: negligible next to a
        step's activations.
    logits(x [S, K], norm, w) -> [S, V] float32
        The final norm and the head, for the sampled rows only.
    new_kv(num_blocks, num_layers, num_kv_heads, block_size, head_dim, dtype, device) -> Tensor
        The pool. The first dimension is the block, all of a block's bytes are contiguous, memory is zeroed; the
        rest of the layout belongs to the implementation. `kv[dst] = kv[src]` copies a block.
    kv_part(kv, heads, part) -> Tensor
        A view of a pool that `new_kv` made for layers of `heads`, a (num_kv_heads, head_dim), as the ops take it for
        the layers of a part, which may have other heads. Its bytes begin behind those of the parts before it.
    copy_blocks(kv, pairs), or None
        Copies whole blocks, (source, target) each, asynchronously: every source is read as it was before the call; no
        target occurs twice. None: indexing as above is used, with temporary memory for all sources.
    kv_block_bytes(num_layers, num_kv_heads, block_size, head_dim, dtype) -> int
        Bytes of one block of that pool.
    greedy(x [S, K], norm, w, allowed) -> (S ids, S bools), or None
        The argmax of each row of `logits`, the lowest id among equals, and whether the row was finite: for an
        implementation that computes it without storing the logits. With norm None, where there is a `linear`, of that
        op's rows. `allowed` is None, or on the host int64
        [S, ceil(V / 64)], contiguous: column i is allowed if bit i % 64 of word i // 64 is set. The finite flags do
        not depend on it; the id is -1 if no column is allowed.
    choose(logits [S, V] float32, rows) -> (ids [R] int64, finite [R] bool, possible [R] bool), or None
        Runs asynchronously on the device. Temperature, top-k, top-p, min-p and one draw from the counter-based
        generator (Philox4x32-10, key seed, counter position then choice), as the engine's sampler does on a CPU. The
        logits are the model's after penalties and masks, and are not changed. finite: every logit is a finite number
        (of masked logits, the caller must have checked this before masking); possible: at least one token was
        left to choose. An id is valid even if a flag is false.
    bind_layers(program) -> BoundLayers, or None
        For an implementation that would lose time between the ops of `layer_program`, of all layers in order. Bitwise
        the same as `layer_program.run_layers`.
    bind_decodes(program) -> BoundDecodes | None, or None
        For an implementation with fewer and larger ops for steps whose sequences have one row each. Sums may be in
        another order than in single ops. None: the program is not one of its forms.
    join(collective) -> None, or None
        From now on the process is one of several ranks that compute every product together, each some columns, and
        gather them. An output column does not depend on the other columns of its call, so the bits stay. The matrices
        are whole in every rank, the shapes of attention in a program are those of the rank's own heads, and so is the
        pool, in whose blocks heads lie one behind the other, layer after layer. Programs are bound after this call, and
        run by `bind_layers` alone.
    join_columns(own [T, C]) -> [T, ranks * C], or None
        For models that no program describes, whose attention is called op by op: the columns of all ranks, in their
        order. All ranks call it with equal shapes. Set with `join`; before that call the result is `own`.
    fetch(where) -> None, or None
        From the next call on, what a step reads once is fetched to there, such as the weights of a step of one row. A
        set chooses for its CPU by itself: this is for measurements. No result depends on it.
    part_of(w, rows) -> LinearWeight, or None
        A packed matrix as some rows of one that has so many, whose product it computes as that one's: for sets that
        `divided` divides among ranks on devices. A gate-up pair has the rows of both.
    """

    name: str
    pack_linear: Callable[[Tensor, Tensor | None], LinearWeight]
    pack_gate_up: Callable[[Tensor, Tensor, Tensor | None], LinearWeight]
    embed: Callable[[Tensor, Tensor], Tensor]
    norm_linear: Callable[[Tensor, Norm | None, LinearWeight], Tensor]
    norm_gate_up: Callable[[Tensor, Norm | None, LinearWeight, Activation], Tensor]
    linear_add: Callable[[Tensor, LinearWeight, Tensor, float], Tensor]
    norm_add: Callable[[Tensor, Norm, Tensor, float], Tensor]
    mul_sigmoid: Callable[[Tensor, Tensor], Tensor]
    rope_write: Callable[[Tensor, Tensor, AttentionShape, Tensor, int, AttentionInput], Tensor]
    attention: Callable[[Tensor, AttentionShape, Tensor, int, AttentionInput], Tensor]
    logits: Callable[[Tensor, Norm, LinearWeight], Tensor]
    new_kv: Callable[[int, int, int, int, int, torch.dtype, torch.device], Tensor]
    kv_part: Callable[[Tensor, tuple[int, int], PoolPart], Tensor]
    kv_block_bytes: Callable[[int, int, int, int, torch.dtype], int]
    # Estimated bits per packed weight, used until `packed_bytes` is known: an upper bound for bf16, without the scales
    # of rows for int8. None: matrices are not packed, and a tied head is the embedding.
    packed_bits: float | None = None
    packed_bytes: Callable[[LinearWeight], int] | None = None  # bytes of one matrix; set with `packed_bits`
    packed_form: PackedForm | None = None  # matrices are plain memory, which may outlive the process
    greedy: Callable[[Tensor, Norm | None, LinearWeight, Tensor | None], tuple[list[int], list[bool]]] | None = None
    linear: Callable[[Tensor, LinearWeight, bool], Tensor] | None = None
    # Where there are no experts, models that have some are refused.
    pack_router: Callable[[Tensor, Tensor | None], LinearWeight] | None = None
    route: Callable[[Tensor, Routing, int], tuple[Tensor, Tensor, Tensor]] | None = None
    mix_experts: Callable[[Tensor, Norm | None, Routing, ExpertMatrices, float, Tensor | None], Tensor] | None = None
    given_experts: Callable[[Tensor, Tensor, Tensor, ExpertMatrices], Tensor] | None = None
    expert_halves: ExpertHalves | None = None  # without them ranks on devices compute no experts
    gate_rows: Callable[[Tensor, Norm | None, LinearWeight, Tensor], Tensor] | None = None
    choose: Callable[[Tensor, ChoiceRows], tuple[Tensor, Tensor, Tensor]] | None = None
    attention_scratch: Callable[[int, int, int, int], int] | None = None
    copy_blocks: Callable[[Tensor, Sequence[tuple[int, int]]], None] | None = None
    bind_layers: Callable[[Sequence[LayerOp]], BoundLayers] | None = None
    bind_decodes: Callable[[Sequence[LayerOp]], BoundDecodes | None] | None = None
    join: Callable[[Collective], None] | None = None
    join_columns: Callable[[Tensor], Tensor] | None = None
    part_of: Callable[[LinearWeight, int], LinearWeight] | None = None
    is_divided: bool = False  # the matrices that it packs are a rank's own columns of each
    optional: tuple[str, ...] = ()  # of `optional_paths`: those that the set could take here, in use or left out
    graphs: bool = True  # steps of its ops may be captured in graphs
    adapted: AdaptedOps | None = None  # None: adapters are refused
    pack_stored: Callable[[Sequence[Sequence[StoredMatrix]], Tensor | None], LinearWeight | None] | None = None
    embed_stored: Callable[[LinearWeight, Tensor], Tensor] | None = None
    stored_bits: Callable[[StoredKind, int, int, float | None], float | None] | None = None
    stored_experts: bool = False  # the matrices of experts may be those of pack_stored, too
    # Whether attention's launches depend only on the numbers of rows and sequences and on bounds of lengths. Then it
    # also handles sequences without rows, and rows without a sequence, whose results are undefined.
    bounded_attention: bool = False
    fetch: Callable[[Fetch], None] | None = None
    own_threads: bool = False  # computes with workers of its own, so that torch needs only one thread
    variant: str = ""  # the instruction set it is compiled for, if there are several
    why_variant: str = ""  # the reason for it, for operators

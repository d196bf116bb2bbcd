"""How many parameters a model has, how many of them a token is multiplied with, and the memory that they take."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from quire_engine.execution.models.checkpoint import StoredSize
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.experts import is_expert
from quire_engine.execution.models.weights import (
    EMBEDDING,
    checked_checkpoint,
    expected_shapes,
    gate_up_parts,
    matrices_after_attention,
    qkv_parts,
)
from quire_kernels.kernel_set import KernelSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters, by their use."""

    embedding: int  # looked up
    head: int  # multiplied with the rows that are sampled; the embedding itself when `tied`
    linear: int  # of the layers
    tail: int  # of `linear`, behind the last layer's attention: only the rows that are sampled get there
    small: int  # norms and biases
    tied: bool
    experts: int = 0  # of `linear`, in experts
    tail_experts: int = 0  # of `tail`, in experts
    num_experts: int = 1  # of a layer
    top_k: int = 1  # of them that multiply a token
    stored: tuple[StoredSize, ...] = ()  # of `linear` and `head`, what may be kept as the checkpoint has it
    stored_experts: tuple[StoredSize, ...] = ()  # likewise, of experts
    stored_embedding: StoredSize | None = None  # likewise
    num_decoded: int = 0  # quantised matrices that are not kept, since plain ones are rows of the same product

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.small + (0 if self.tied else self.head)

    @property
    def for_each_token(self) -> int:
        """The number that every token is multiplied with."""
        return self._active(self.linear, self.experts) - self._active(self.tail, self.tail_experts) + self.small

    @property
    def for_sampled_tokens(self) -> int:
        """The number that a token is multiplied with beside those where its logits are needed."""
        return self._active(self.tail, self.tail_experts) + self.head

    def _active(self, matrices: int, experts: int) -> int:
        return matrices - experts + experts * self.top_k // self.num_experts

    def stored_as(self, form: object | None) -> str:
        """The checkpoint's quantisation as the plan tells it; empty: it has none."""
        if form is None or not self.num_decoded:
            return "" if form is None else str(form)
        return f"{form} (but for {self.num_decoded} matrices beside plain ones, which are decoded)"

    def kept(self, kernels: KernelSet) -> tuple[StoredSize, ...]:
        """The matrices that may stay as the checkpoint has them with these kernels."""
        if kernels.stored_bits is None:
            return ()
        return self.stored + (self.stored_experts if kernels.stored_experts else ())

    def memory(
        self, itemsize: int, kernels: KernelSet, packed_bytes: int | None = None, *, memories: int = 1
    ) -> WeightMemory:
        """`packed_bytes`: what all matrices take, once that is known.

        `memories`: of ranks on devices, of which each has its part of the matrices, and whole what is not divided; both
        sizes are then of one.
        """
        packed_bits = kernels.packed_bits
        if packed_bytes is None:
            usual = packed_bits or 8.0 * itemsize
            saved = sum(each.saved(kernels, usual) for each in self.kept(kernels))
            packed_bytes = int((self.linear + self.head) * usual - saved) // (8 * memories)
        read = packed_bytes + self.small * itemsize
        apart = packed_bits is not None or not self.tied or memories > 1
        # All matrices alike: of a router, which is not quantised, there is little.
        experts = packed_bytes * self.experts // max(1, self.linear + self.head)
        total = read + (self._embedding_bytes(itemsize, kernels) if apart else 0)
        return WeightMemory(
            total=total, read=read - experts + experts * self.top_k // self.num_experts, experts=experts
        )

    def _embedding_bytes(self, itemsize: int, kernels: KernelSet) -> int:
        """Return the bytes of an embedding beside the head: none where both are one matrix, kept as it is stored."""
        numbers = self.embedding * itemsize
        if self.stored_embedding is None or kernels.embed_stored is None:
            return numbers
        saved = self.stored_embedding.saved(kernels, 8.0 * itemsize)
        return 0 if self.tied and saved else numbers - int(saved) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMemory:
    """Bytes of loaded weights."""

    total: int
    read: int  # for one token with its logits; the embedding is looked up
    experts: int = 0  # of `total`, of which one token reads its share


def count_parameters(path: Path, model: ModelConfig) -> Parameters:
    """Count parameters by the configuration once the files' headers agree with it; no weight is read."""
    shapes = expected_shapes(model)
    with checked_checkpoint(path, model) as checkpoint:
        kept = dict(checkpoint.stored_sizes())
    decoded = _beside_plain(kept.keys(), model)
    kept = {name: size for name, size in kept.items() if name not in decoded}
    stored_embedding = kept.get(EMBEDDING)
    if not model.tie_word_embeddings:
        kept.pop(EMBEDDING, None)
    table = model.vocab_size * model.hidden_size
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    small = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1)
    tables = table if model.tie_word_embeddings else 2 * table
    tail = {name: sizes[name] for name in matrices_after_attention(model, model.num_layers - 1)}
    return Parameters(
        embedding=table,
        head=table,
        linear=sum(sizes.values()) - tables,
        tail=sum(tail.values()),
        small=small,
        tied=model.tie_word_embeddings,
        experts=sum(size for name, size in sizes.items() if is_expert(name)),
        tail_experts=sum(size for name, size in tail.items() if is_expert(name)),
        num_experts=1 if model.experts is None else model.experts.count,
        top_k=1 if model.experts is None else model.experts.top_k,
        stored=tuple(size for name, size in kept.items() if not is_expert(name)),
        stored_experts=tuple(size for name, size in kept.items() if is_expert(name)),
        stored_embedding=stored_embedding,
        num_decoded=len(decoded),
    )


def _beside_plain(kept: Set[str], model: ModelConfig) -> set[str]:
    """Quantised matrices that are rows of one product with plain ones."""
    found: set[str] = set()
    for index in range(model.num_layers):
        products = [qkv_parts(model, index)]
        if not model.has_experts(index):
            products.append([*gate_up_parts(model, index)])
        for parts in products:
            names = {part.named(".weight").name for part in parts}
            found |= names & kept if names - kept else set()
    return found

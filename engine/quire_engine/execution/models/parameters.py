"""How many parameters a model has, and what memory they take once loaded.

Promises: counts come from the configuration and are checked against the files' headers; no weight is read.
Must not know: how a matrix is packed, devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from quire_engine.execution.models.checkpoint import open_checkpoint
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.weights import expected_shapes, matrices_after_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMemory:
    """Bytes of loaded weights."""

    total: int
    read: int  # for one token with its logits; the embedding is looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Counts by what becomes of them."""

    embedding: int  # looked up
    head: int  # multiplied with the rows that are sampled; the embedding itself when `tied`
    linear: int  # of the layers
    tail: int  # of `linear`, behind the last layer's attention: only the rows that are sampled get there
    small: int  # norms and biases
    tied: bool

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.small + (0 if self.tied else self.head)

    def memory(self, itemsize: int, packed_bits: float | None, packed_bytes: int | None = None) -> WeightMemory:
        """`packed_bits` as in `KernelSet`; `packed_bytes`: what all matrices take, once that is known."""
        if packed_bytes is None:
            packed_bytes = int((self.linear + self.head) * (packed_bits or 8 * itemsize)) // 8
        read = packed_bytes + self.small * itemsize
        apart = packed_bits is not None or not self.tied
        return WeightMemory(total=read + (self.embedding * itemsize if apart else 0), read=read)


def count_parameters(path: Path, model: ModelConfig) -> Parameters:
    """From the configuration, once the files' headers agree with it; left-over tensors are the loader's to judge."""
    shapes = expected_shapes(model)
    with open_checkpoint(path) as checkpoint:
        checkpoint.drop(lambda name: name not in shapes)
        checkpoint.require(shapes)
    table = model.vocab_size * model.hidden_size
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    small = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1)
    tables = table if model.tie_word_embeddings else 2 * table
    return Parameters(
        embedding=table,
        head=table,
        linear=matrices - tables,
        tail=sum(math.prod(shapes[name]) for name in matrices_after_attention(model.num_layers - 1)),
        small=small,
        tied=model.tie_word_embeddings,
    )

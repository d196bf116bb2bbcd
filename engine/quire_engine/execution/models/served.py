"""A model as the engine plans with it, loads it and drives it, whichever implementation computes it.

Promises: `models.decoder` and `models.fallback` both have these, and beside the loader nothing knows which it is.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.kv_groups import KVHeads, KVLayout
from quire_engine.execution.model_input import ModelInput
from quire_engine.execution.models.checkpoint import StoredTensors, fingerprint
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.matrix_parts import WeightSource
from quire_engine.execution.models.quantisation import Quantisation
from quire_engine.ranks import ALONE, Rank
from quire_kernels.kernel_set import ChoiceRows, KernelSet
from quire_kernels.packed_form import PackedForm


class ModelFacts(Protocol):
    """The numbers of a model that its memory and its steps depend on."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...  # with keys and values
    @property
    def num_heads(self) -> int: ...
    @property
    def kv_heads(self) -> tuple[KVHeads, ...]: ...  # of each layer
    @property
    def num_kv_heads(self) -> int: ...  # at most
    @property
    def head_dim(self) -> int: ...  # at most
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...  # of each layer; none where layers cannot have blocks of their own
    @property
    def quantisation(self) -> Quantisation | None: ...  # of the checkpoint's matrices


class ServedModel(Protocol):
    """A model with its weights, as a runner drives it."""

    @property
    def config(self) -> ModelFacts: ...
    @property
    def packed_bytes(self) -> int | None: ...
    @property
    def chains_decodes(self) -> bool: ...
    def forward(self, step: ModelInput, kv: Tensor) -> Tensor: ...
    def normed(self, hidden: Tensor) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def greedy(self, hidden: Tensor, allowed: Tensor | None) -> tuple[list[int], list[bool]] | None: ...
    def choose(self, logits: Tensor, rows: ChoiceRows) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The model to load, and the kernels that will compute it."""

    asked: EngineConfig
    model: ModelFacts
    kernels: KernelSet
    dtype: torch.dtype
    device: torch.device
    threads: int
    layout: KVLayout  # of the pool
    rank: Rank = ALONE

    @property
    def path(self) -> Path:
        return Path(self.asked.model)

    def key(self, form: PackedForm, implementation: str) -> str:
        """Everything that packed bytes depend on and that is known without reading the checkpoint."""
        facts = {"checkpoint": fingerprint(self.path), "dtype": str(self.dtype), "form": form.name}
        if implementation:
            facts["implementation"] = implementation
        if isinstance(self.model, ModelConfig) and self.model.headless:  # which another file may say
            facts["head"] = "embedding"
        if self.model.quantisation is not None and self.kernels.stored_bits is not None:
            # At first experts, embeddings and the blocks of GGUF files were decoded.
            facts["stored"] = "all kept"
        return json.dumps(facts, sort_keys=True)


class Parts(Protocol):
    """The steps from a checkpoint to a model that differ between implementations."""

    name: str  # of an implementation that is not ours, with its version

    def check(self) -> None:
        """See that the model can be served, before its weights are read. Raises ModelLoadError."""
        ...

    def most_image_bytes(self, form: PackedForm) -> int | None:
        """An upper bound on the bytes of the packed weights; None: they do not go into an image."""
        ...

    def opened(self) -> AbstractContextManager[StoredTensors]:
        """The checkpoint's files, checked against the configuration. Raises ModelLoadError."""
        ...

    def assemble(self, source_of: SourceOf, *, device: torch.device, max_model_len: int) -> ServedModel:
        """The model, with the weights of `opened` or of an image made of them."""
        ...


class SourceOf(Protocol):
    """The source of weights for each type in which they are kept."""

    def __call__(self, dtype: torch.dtype) -> WeightSource: ...
    def has(self, name: str) -> bool: ...

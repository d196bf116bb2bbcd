"""The parts of a transformers model that serves, from a checkpoint's directory: the facts, the proof, the weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.execution.device import resolve_device
from quire_engine.execution.models.checkpoint import StoredSize, StoredTensors, open_checkpoint
from quire_engine.execution.models.dequantising import decode_quantised
from quire_engine.execution.models.fallback.attention import (
    PLAIN_HEAD_DIM,
    divides_heads,
    uses_kernels,
    with_plain_pool,
)
from quire_engine.execution.models.fallback.decoder import FallbackDecoder
from quire_engine.execution.models.fallback.facts import Facts, learn_facts
from quire_engine.execution.models.fallback.model_class import IMPLEMENTATION, model_class
from quire_engine.execution.models.fallback.proof import prove
from quire_engine.execution.models.fallback.states import COPIES
from quire_engine.execution.models.fallback.weights import ConvertedCheckpoint, fits_image, most_image_bytes
from quire_engine.execution.models.parameters import Parameters
from quire_engine.execution.models.served import SourceOf, Wanted
from quire_engine.execution.packed.image import ALIGNMENT, HEADER_BYTES
from quire_engine.ranks import ALONE
from quire_kernels.kernel_set import KernelSet
from quire_kernels.packed_form import PackedForm

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FallbackModel:
    """See `models.found.FoundModel`."""

    facts: Facts
    asked: EngineConfig
    implementation: str = IMPLEMENTATION

    @property
    def head_dim(self) -> int:
        return self.facts.head_dim if self._by_kernels else PLAIN_HEAD_DIM

    @property
    def state_bytes(self) -> int:
        return COPIES * self.facts.state_bytes

    def over(self, kernels: KernelSet) -> KernelSet:
        return kernels if self._by_kernels else with_plain_pool(kernels, self.facts)

    def divides_heads(self, size: int) -> bool:
        return divides_heads(self.facts, self.asked.limits.block_size, size)

    def parameters(self, path: Path) -> Parameters:
        """The loader holds the files against the model."""
        form = self.facts.quantisation
        if form is None:
            return self.facts.parameters
        with open_checkpoint(path) as checkpoint:
            decode_quantised(checkpoint, form)
            stored: list[StoredSize] = []
            experts: list[StoredSize] = []
            for name, size in checkpoint.stored_sizes():
                (experts if ".experts." in name else stored).append(size)
        # Experts that are computed one by one are stacked with their numbers.
        kept = tuple(experts) if self.facts.fused_experts else ()
        return replace(self.facts.parameters, stored=tuple(stored), stored_experts=kept)

    @property
    def _by_kernels(self) -> bool:
        return uses_kernels(self.facts, self.asked.limits.block_size)


def find_model(config: EngineConfig) -> FallbackModel:
    """The model by its class in transformers. Raises ConfigError, ModelLoadError."""
    made = model_class(Path(config.model))
    if resolve_device(config.device).type != "cpu":
        raise ConfigError(
            f"device={config.device}: {made.name} has no entry of ours, and transformers' code is used on a CPU"
            " only; set device to cpu"
        )
    name = made.dtype if config.dtype == "auto" else config.dtype
    with naming(Path(config.model) / "config.json"):
        facts = learn_facts(made, getattr(torch, name))
    plain = not uses_kernels(facts, config.limits.block_size)
    if plain and config.kv_cache_dtype != "auto":
        raise ConfigError(f"kv_cache_dtype={config.kv_cache_dtype} is not possible for {made.name}; set it to auto")
    if facts.is_recurrent:
        if config.swap_space:
            raise ConfigError(f"swap_space: {made.name} keeps a recurrent state, which is not swapped; set it to 0")
        if config.limits.enable_prefix_caching:
            _log.info(
                "prefix caching is off: %s keeps a recurrent state, which no block of another request has", made.name
            )
            config = replace(config, limits=replace(config.limits, enable_prefix_caching=False))
    return FallbackModel(facts, config)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A refusal names the file or the folder that it is about."""
    try:
        yield
    except ModelLoadError as error:
        text = str(error)
        raise ModelLoadError(text if str(path.parent) in text else f"{path}: {text}") from error


class FallbackParts:
    """See `loading.Parts`."""

    name = IMPLEMENTATION

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._facts = cast(Facts, wanted.model)
        self._made = model_class(wanted.path)
        self._model: Any = None

    def most_image_bytes(self, form: PackedForm) -> int | None:
        model = self._fresh()
        if not fits_image(model, self._facts, HEADER_BYTES):
            return None
        return most_image_bytes(model, self._facts, form, ALIGNMENT)

    def check(self) -> None:
        if self._wanted.rank.number > 0:  # the first rank has checked the same model
            return
        asked = self._wanted.asked
        longest = asked.max_model_len or self._facts.max_position_embeddings
        with naming(self._wanted.path / "config.json"):
            prove(self._made, longest, Path(asked.packed_cache_dir) if asked.packed_cache else None)

    @contextmanager
    def opened(self) -> Iterator[StoredTensors]:
        with open_checkpoint(self._wanted.path) as checkpoint, naming(self._wanted.path):
            if self._facts.quantisation is not None:
                decode_quantised(checkpoint, self._facts.quantisation)
            yield ConvertedCheckpoint(checkpoint, self._fresh(), self._facts)

    def assemble(self, source_of: SourceOf, *, device: torch.device, max_model_len: int) -> FallbackDecoder:
        del device  # the CPU: others are refused
        wanted, limits = self._wanted, self._wanted.asked.limits
        model, self._model = self._fresh(), None
        rank = wanted.rank if divides_heads(self._facts, limits.block_size, wanted.rank.size) else ALONE
        return FallbackDecoder(
            self._facts,
            model,
            wanted.kernels,
            layout=wanted.layout,
            dtype=wanted.dtype,
            block_size=limits.block_size,
            max_model_len=max_model_len,
            max_num_seqs=limits.max_num_seqs,
            sources=source_of,
            has_buffer=source_of.has,
            rank=rank,
        )

    def _fresh(self) -> Any:
        """The model without weights; made again when it has been filled."""
        if self._model is None:
            self._model = self._made.without_parameters(self._wanted.dtype)
        return self._model

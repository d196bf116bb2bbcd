"""The adapters in memory: read and packed beside the steps, kept by digest, dropped when others need their place.

Promises: a request computes with the weights whose digest it names or ends with an error, never with others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.contract.types import Adapter, AdaptersInUse
from quire_engine.execution.load_thread import LoadThread
from quire_engine.execution.model_input import host_tensor
from quire_engine.execution.models.adapter import ReadAdapter, adapted_products, most_adapter_bytes, read_adapter
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.served import ModelFacts
from quire_engine.execution.models.sites import SITES
from quire_engine.execution.step_tensors import StepTensors
from quire_kernels.kernel_set import AdaptedOps, AdapterSites, KernelSet, StepAdapters
from quire_kernels.low_rank import LowRank, LowRankMatrix


@dataclass(frozen=True, slots=True)
class Packed:
    """An adapter as kernels take it."""

    digest: str
    rank: int
    sites: AdapterSites
    num_bytes: int


class Copied(Protocol):
    """An adapter in memory that a device copies from."""

    tensor: Tensor


class Placed(Protocol):
    """The adapters in a device's places; see `gpu.adapters.PlacedAdapters`."""

    packed_of: Callable[[str], Any]

    def packed(self, matrices: Mapping[int, LowRankMatrix]) -> Copied: ...


class AdapterCache:
    """A cache of at most `most` adapters, which drops none that running or waiting requests have.

    Where all have some, the one that was asked for least recently takes no further requests until it is dropped, so
    that a request for another adapter waits for those alone that came before.
    """

    def __init__(
        self, config: ModelConfig, ops: AdaptedOps, *, max_rank: int, most: int, placed: Placed | None = None
    ) -> None:
        """`placed`: those of a device, to which adapters are copied from here."""
        self.placed = placed
        if placed is not None:
            placed.packed_of = self.sites_of
        self._config, self._ops, self._max_rank, self._most = config, ops, max_rank, most
        self._packed: dict[str, Packed] = {}  # by digest; the one that was asked for least recently first
        self._leaving: set[str] = set()  # digests
        self._loads: dict[str, Future[Packed]] = {}  # for requests, by digest
        self._orders: dict[str, Future[Packed]] = {}  # for the operator, by the order's name
        self._thread = LoadThread(self._load, "adapters")

    @property
    def leaving(self) -> frozenset[str]:
        """Digests of those whose place is wanted for others, and which therefore take no further requests."""
        return frozenset(self._leaving)

    def prepare(self, adapter: Adapter, in_use: AdaptersInUse) -> str | None:
        """Empty once requests may compute with it, or the reason why none can; None: later.

        `in_use`: by requests that run or wait for their steps, and by others that are set aside.
        """
        digest = adapter.digest
        if digest in self._packed and digest not in self._leaving:
            self._packed[digest] = self._packed.pop(digest)
            return ""
        self._thread.give_up_overdue()
        load = self._loads.get(digest)
        if load is None:
            return self._begin(adapter, in_use)
        if not load.done():
            return None
        return self._end(adapter, self._loads.pop(digest))

    def order(self, name: str, path: str, in_use: AdaptersInUse) -> dict[str, Any] | None:
        """Load an adapter by an order of this name: its facts, or None: ask again. Raises ModelLoadError."""
        self._thread.give_up_overdue()
        load = self._orders.get(name)
        if load is None:
            self._orders[name] = self._thread.submit(path)
            return None
        if not load.done():
            return None
        del self._orders[name]
        packed = load.result()
        if packed.digest not in self._packed and self._make_room(in_use, now_or_never=True):
            self._packed[packed.digest] = packed
        return {"digest": packed.digest, "rank": packed.rank, "num_bytes": packed.num_bytes}

    def forget(self, digest: str, in_use: AdaptersInUse) -> None:
        """No further requests will come for it."""
        if digest not in in_use.active and digest not in in_use.held:
            self._packed.pop(digest, None)
        elif digest in self._packed:  # the first to go
            self._packed = {digest: self._packed.pop(digest), **self._packed}

    def wait(self, seconds: float) -> None:
        """Wait until one more adapter is read, at most `seconds`."""
        loads = [*self._loads.values(), *self._orders.values()]
        if loads:
            wait(loads, seconds, return_when="FIRST_COMPLETED")
        else:
            time.sleep(seconds)  # requests wait for the end of others

    def of_step(self, step: StepTensors) -> StepAdapters:
        """The adapters of a step's rows. KeyError where one is not in memory."""
        slots = host_tensor(step.adapter_slots, torch.device("cpu"))
        return StepAdapters(slots=slots, adapters=tuple([self._packed[digest].sites for digest in step.adapters]))

    def sites_of(self, digest: str) -> AdapterSites:
        """Return an adapter's packed matrices. KeyError where it is not in memory."""
        return self._packed[digest].sites

    def _begin(self, adapter: Adapter, in_use: AdaptersInUse) -> str | None:
        digest = adapter.digest
        if digest not in self._packed:
            if self._make_room(in_use):
                self._loads[digest] = self._thread.submit(adapter.path)
            return None
        if digest in in_use.active:
            return None
        self._leaving.discard(digest)  # the request that wanted its place has gone
        return ""

    def _end(self, adapter: Adapter, load: Future[Packed]) -> str:
        try:
            packed = load.result()
        except ModelLoadError as error:
            return f"the adapter {adapter.name} cannot be loaded: {error}"
        if packed.digest != adapter.digest:
            return f"the files of the adapter {adapter.name} are no longer those that it was loaded from; load it again"
        self._packed[packed.digest] = packed
        return ""

    def _make_room(self, in_use: AdaptersInUse, *, now_or_never: bool = False) -> bool:
        """Whether there is room for one more; else one of those in use is to leave."""
        if len(self._packed) + len(self._loads) < self._most:
            return True
        idle = next(
            (digest for digest in self._packed if digest not in in_use.active and digest not in in_use.held), None
        )
        if idle is None:  # what was set aside is read again when it goes on
            idle = next((digest for digest in self._packed if digest not in in_use.active), None)
        if idle is not None:
            del self._packed[idle]
            self._leaving.discard(idle)
            return True
        if not now_or_never and not self._leaving and self._packed:
            self._leaving.add(next(iter(self._packed)))
        return False

    def _load(self, path: str) -> Packed:
        with torch.inference_mode():
            read = read_adapter(Path(path), self._config, max_rank=self._max_rank)
            if self.placed is None:
                return pack(read, self._config, self._ops)
            single = {site: each for site, each in read.matrices.items() if isinstance(each, LowRankMatrix)}
            if len(single) < len(read.matrices):
                raise ModelLoadError(f"{path}: it adds to experts that rows choose, which is computed on a CPU only")
            buffer = self.placed.packed(single)
            return Packed(read.digest, read.rank, buffer, buffer.tensor.nbytes)


def _check(config: EngineConfig, model: ModelFacts, kernels: KernelSet, device: torch.device) -> None:
    """Raises ConfigError where adapters cannot be computed, or where their limits disagree."""
    reason = ""
    if not isinstance(model, ModelConfig):
        reason = f"transformers' code computes {model.architecture}, to which adapters cannot be added"
    elif kernels.adapted is None:
        reason = f"the {kernels.name} kernels compute no adapters"
    elif device.type != "cpu" and kernels.adapted.placed is None:
        reason = f"the {kernels.name} kernels compute adapters on a CPU only"
    if reason:
        raise ConfigError(f"enable_lora: {reason}; leave it out, or merge the adapter into the checkpoint")
    for name, value in (("max_lora_rank", config.max_lora_rank), ("max_cpu_loras", num_kept(config))):
        if value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    if num_kept(config) < config.limits.max_loras:
        raise ConfigError(
            f"max_cpu_loras={config.max_cpu_loras} is less than max_loras, the {config.limits.max_loras} adapters that"
            f" run at once; set max_cpu_loras to {config.limits.max_loras} or more"
        )


def num_kept(config: EngineConfig) -> int:
    """Adapters in memory at most; 0: there are none."""
    if not config.enable_lora:
        return 0
    return config.limits.max_loras if config.max_cpu_loras is None else config.max_cpu_loras


def adapter_bytes(config: EngineConfig, model: ModelFacts, kernels: KernelSet, device: torch.device) -> int:
    """The memory of all adapters that may be there at once. Raises ConfigError where they cannot be."""
    if config.enable_lora:
        _check(config, model, kernels, device)
    if not config.enable_lora or not isinstance(model, ModelConfig) or kernels.adapted is None:
        return 0
    itemsize, placed = kernels.adapted.itemsize, kernels.adapted.placed
    if placed is not None:  # the others are in the host's memory
        return config.limits.max_loras * placed.num_bytes(adapted_products(model), config.max_lora_rank, itemsize)
    return num_kept(config) * most_adapter_bytes(model, config.max_lora_rank, itemsize)


def adapter_scratch(config: EngineConfig, model: ModelFacts, kernels: KernelSet) -> int:
    """Bytes of a device that the largest step with adapters takes beyond one without them."""
    placed = None if kernels.adapted is None else kernels.adapted.placed
    if not config.enable_lora or not isinstance(model, ModelConfig) or placed is None:
        return 0
    return placed.scratch(adapted_products(model), config.max_lora_rank, config.limits.max_num_batched_tokens)


def make_adapters(
    config: EngineConfig, model: ModelFacts, kernels: KernelSet, placed: Placed | None
) -> AdapterCache | None:
    """The adapters of an engine; None where they are not enabled. `placed`: the places of a device."""
    if not config.enable_lora or not isinstance(model, ModelConfig) or kernels.adapted is None:
        return None
    most = num_kept(config)
    return AdapterCache(model, kernels.adapted, max_rank=config.max_lora_rank, most=most, placed=placed)


def pack(read: ReadAdapter, config: ModelConfig, ops: AdaptedOps) -> Packed:
    """An adapter in the form of the kernels."""
    sites: list[LowRank | None] = [None] * (config.num_layers * len(SITES))
    for site, matrix in read.matrices.items():
        if isinstance(matrix, LowRankMatrix):
            sites[site] = ops.pack(matrix)
        elif ops.pack_experts is None:
            raise ModelLoadError("it adds to experts, which these kernels do not; leave them out of its targets")
        else:
            sites[site] = ops.pack_experts(matrix)
    num_bytes = sum(ops.num_bytes(packed) for packed in sites if packed is not None)
    return Packed(read.digest, read.rank, ops.bind(sites), num_bytes)

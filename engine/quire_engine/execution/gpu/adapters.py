"""The adapters in a device's places, copied there with the first step that has them.

Owns which adapter is where. Promises: a copy is issued before the step that needs it and behind all steps that had the
place's adapter before, in the one order of the device's work, so no step ever computes with another one's weights.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Mapping

import torch

from quire_engine.contract.config import EngineConfig
from quire_engine.execution.gpu.device import Device, HostBuffer, pinned_buffer
from quire_engine.execution.models.adapter import adapted_products
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.served import ModelFacts
from quire_engine.execution.step_tensors import StepTensors
from quire_kernels.kernel_set import KernelSet
from quire_kernels.low_rank import LowRankMatrix, Places

_KEPT = 8  # buffers of the last copies, which may not be done


def place_adapters(
    config: EngineConfig, model: ModelFacts, kernels: KernelSet, dtype: torch.dtype, device: torch.device
) -> PlacedAdapters | None:
    """Take the memory of the places; None where there are none."""
    placed = None if kernels.adapted is None else kernels.adapted.placed
    if not config.enable_lora or not isinstance(model, ModelConfig) or placed is None:
        return None
    products, count = adapted_products(model), config.limits.max_loras
    return PlacedAdapters(placed.make(products, count, config.max_lora_rank, dtype, device), pinned_buffer)


class PlacedAdapters:
    """The adapters in a device's places, as many as a step may have."""

    def __init__(self, places: Places, host_buffer: Callable[[int], HostBuffer]) -> None:
        self.places, self._host_buffer = places, host_buffer
        # By digest; the owner of the adapters sets it.
        self.packed_of: Callable[[str], HostBuffer] = dict[str, HostBuffer]().__getitem__
        self._place_of: dict[str, int] = {}  # by digest, the one that was used least recently first
        self._sent: deque[HostBuffer] = deque(maxlen=max(_KEPT, 2 * places.count))

    def packed(self, matrices: Mapping[int, LowRankMatrix]) -> HostBuffer:
        """An adapter as it is copied; from any thread."""
        buffer = self._host_buffer(len(self.places.place(0)))
        self.places.fill(buffer.tensor, matrices)
        return buffer

    def place_rows(self, step: StepTensors, device: Device) -> array[int]:
        """The place of each row's adapter, or -1, once the copies of adapters that are not there are issued.

        KeyError where an adapter is not in memory.
        """
        places = [self._place(digest, step, device) for digest in step.adapters]
        return array("i", [places[slot] if slot >= 0 else -1 for slot in step.adapter_slots])

    def _place(self, digest: str, step: StepTensors, device: Device) -> int:
        place = self._place_of.pop(digest, None)
        if place is None:
            buffer, place = self.packed_of(digest), self._free(step)
            device.send(buffer.tensor, self.places.place(place))
            self._sent.append(buffer)
        self._place_of[digest] = place
        return place

    def _free(self, step: StepTensors) -> int:
        if len(self._place_of) < self.places.count:
            return next(place for place in range(self.places.count) if place not in self._place_of.values())
        old = next((digest for digest in self._place_of if digest not in step.adapters), None)
        if old is None:
            raise ValueError(f"a step has {len(step.adapters)} adapters, and there are {self.places.count} places")
        return self._place_of.pop(old)

"""All that a step takes from the host, in one buffer and one copy.

Promises: sections of the same lengths lie at the same device addresses in every step, so that a graph finds them; a
host buffer is written again only when the copy that read it is done. Must not know: what the sections mean.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.execution.gpu.device import Device, Event, HostBuffer

ALIGNMENT = 16  # bytes: kernels are compiled for addresses that are multiples of it
_DTYPES = {"q": torch.int64, "i": torch.int32}


@dataclass(slots=True)
class _Slot:
    """One of the host buffers."""

    buffer: HostBuffer
    read: Event | None = None  # by the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One step's sections on the device, by name."""

    target: Tensor
    sections: Mapping[str, tuple[int, int, torch.dtype]]  # offset and length in bytes

    def __getitem__(self, name: str) -> Tensor:
        """The section [n], which holds until the next step's is sent."""
        offset, length, dtype = self.sections[name]
        return self.target[offset : offset + length].view(dtype)


class PackedInput:
    """Owns the host buffers, which take turns, and writes to `target`."""

    def __init__(self, device: Device, target: Tensor, *, num_buffers: int = 2) -> None:
        """`target` [n] uint8 on the device, aligned: what one step can hold."""
        self._device, self._target = device, target
        self._slots = [_Slot(device.host_buffer(target.numel())) for _ in range(num_buffers)]
        self._turn = 0

    def send(self, arrays: Mapping[str, array[int]]) -> Packed:
        """Issue the copy. ValueError for more than the buffer holds."""
        sections: dict[str, tuple[int, int, torch.dtype]] = {}
        end = 0
        for name, values in arrays.items():
            length = len(values) * values.itemsize
            sections[name] = end, length, _DTYPES[values.typecode]
            end += aligned(length)
        if end > self._target.numel():
            raise ValueError(f"a step's input of {end} bytes is more than the {self._target.numel()} it was given")
        slot = self._next()
        into = slot.buffer.bytes
        for (offset, length, _), values in zip(sections.values(), arrays.values(), strict=True):
            if length:
                into[offset : offset + length] = memoryview(values).cast("B")
        if end:
            self._device.send(slot.buffer.tensor[:end], self._target[:end])
            slot.read = self._device.record()
        return Packed(target=self._target, sections=sections)

    def _next(self) -> _Slot:
        """The buffer whose turn it is, when the device has read it."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % len(self._slots)
        if slot.read is not None:
            slot.read.wait()
        return slot


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

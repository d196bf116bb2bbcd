"""The interface of a device to the GPU runner, its implementation by torch.cuda, and a step's input in one copy."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: kernels are compiled for addresses that are multiples of it
_DTYPES = {"q": torch.int64, "i": torch.int32}


class Device(Protocol):
    """One device with one stream of work.

    Operations issued inside `work`, or to one lane, run on the device in the order in which they were issued;
    between them only events make an order. Only `Event.wait` and `capture` make the host wait.
    """

    torch_device: torch.device  # where tensors are made

    def work(self) -> AbstractContextManager[object]:
        """torch's operations inside are issued to the stream."""
        ...

    def host_buffer(self, num_bytes: int) -> HostBuffer: ...

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy from a host buffer; it must stay as it is until an event recorded afterwards has been waited for."""
        ...

    def fetch(self, source: Tensor, target: Tensor) -> None:
        """Copy to a host buffer, which holds the copy when an event recorded afterwards has been waited for."""
        ...

    def record(self) -> Event:
        """An event behind everything issued so far."""
        ...

    def lane(self) -> Lane:
        """A new one."""
        ...

    def follow(self, event: Event) -> None:
        """Make the stream's later operations wait for a lane's event."""
        ...

    def capture(self, body: Callable[[], None]) -> Graph:
        """Record the operations of `body` without running them.

        Raises torch.OutOfMemoryError, or RuntimeError for an operation that no graph can hold; the device stays usable.
        """
        ...

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return a view of a contiguous tensor that a capture allocated, which does not keep its memory.

        Graphs that keep their results have memory of their own for them; those that borrow share it.
        """
        ...

    def release(self) -> None:
        """Release unused memory."""
        ...


class HostBuffer:
    """Memory of the host that a device copies from and to by itself."""

    def __init__(self, tensor: Tensor) -> None:
        """`tensor` [n] uint8, on the host; pinned where that means something."""
        self.tensor = tensor
        # Written and read through memory, not through torch: that costs a tenth, and is no work of the device.
        self.bytes = memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


class Event(Protocol):
    """A point in the stream."""

    def wait(self) -> None:
        """Return when all work that was issued before the point is done."""
        ...


class Lane(Protocol):
    """A second stream of the device, for copies that run beside the work."""

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copy from a host buffer. Only a stream that follows a later event waits for the copy."""
        ...

    def fetch(self, source: Tensor, target: Tensor) -> None:
        """Copy to a host buffer."""
        ...

    def follow(self, event: Event) -> None:
        """Make the lane's later operations wait for the event."""
        ...

    def record(self) -> Event:
        """An event behind everything that was issued to the lane."""
        ...


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Issue it again, on the addresses of the capture. What it allocated itself holds until the next replay."""
        ...


class CudaDevice:
    """See `Device`. By torch.cuda, with one stream of its own, in which graphs are captured too, and one for each lane.

    All graphs share one memory pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        # What was made before, the weights above all, was issued to another stream.
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # made for the first graph

    def work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        return pinned_buffer(num_bytes)

    def send(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fetch(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> CudaEvent:
        return _record(self._stream)

    def lane(self) -> CudaLane:
        return CudaLane(self.torch_device)

    def follow(self, event: Event) -> None:
        _hold_up(self._stream, event)

    def capture(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        shortage: torch.OutOfMemoryError | None = None
        try:
            # Other threads of the process may call CUDA meanwhile: only this one's calls must be fit for a capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    body()
                except torch.OutOfMemoryError as error:
                    shortage = error.with_traceback(None)  # its frames keep tensors alive
        except RuntimeError:
            # A capture that was cut short may not end cleanly; what cut it short is what the caller can act on.
            if shortage is None:
                raise
        if shortage is not None:
            raise shortage
        return graph

    def borrow(self, tensor: Tensor) -> Tensor:
        # The memory stays: a pool keeps what it has as long as one of its graphs is there.
        return torch.as_tensor(_Borrowed(tensor), device=self.torch_device).view(tensor.dtype)

    def release(self) -> None:
        torch.cuda.empty_cache()


class CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def fetch(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def follow(self, event: Event) -> None:
        _hold_up(self._stream, event)

    def record(self) -> CudaEvent:
        return _record(self._stream)


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for it, and not the host."""
        stream.wait_event(self._event)


class _Borrowed:
    """An address, as torch takes it from other libraries: of integers, since not all of them know bfloat16."""

    def __init__(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError("only contiguous memory is borrowed")
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "strides": None,
            "version": 3,
        }


def _record(stream: torch.cuda.Stream) -> CudaEvent:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return CudaEvent(event)


def _hold_up(stream: torch.cuda.Stream, event: Event) -> None:
    if not isinstance(event, CudaEvent):
        raise TypeError("an event of another device")
    event.hold_up(stream)


def capture_on(make_device: Callable[[], Device]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """A function that records work on a device, made at the first call, and returns what replays it and waits.

    The work's memory may be written by other streams of the device between two replays.
    """

    def capture(body: Callable[[], None]) -> Callable[[], None]:
        device = make_device()
        with device.work():
            graph = device.capture(body)

        def replay() -> None:
            if device.torch_device.type == "cuda":
                torch.cuda.synchronize(device.torch_device)
            with device.work():
                graph.replay()
            device.record().wait()

        return replay

    return capture


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
    """Sends all that a step takes from the host, in one buffer and one copy.

    Owns the host buffers, which take turns, and writes to `target`. Sections of the same lengths lie at the same device
    addresses in every step, so that a graph finds them. A host buffer is written again only when the copy that read it
    is done.
    """

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


def pinned_buffer(num_bytes: int) -> HostBuffer:
    """Memory that any CUDA device copies from and to by itself."""
    return HostBuffer(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT

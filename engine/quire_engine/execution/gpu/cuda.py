"""The device by torch.cuda.

Promises: one stream of its own, in which graphs are captured too, and one for each lane; all graphs share one memory
pool.
Must not know: models, steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from quire_engine.execution.gpu.device import Event, HostBuffer


class CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for it, and nobody else."""
        stream.wait_event(self._event)


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


class CudaDevice:
    """See `Device`."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        # What was made before, the weights above all, was issued to another stream.
        torch.cuda.synchronize(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # made for the first graph

    def work(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        return HostBuffer(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True))

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


def _record(stream: torch.cuda.Stream) -> CudaEvent:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return CudaEvent(event)


def _hold_up(stream: torch.cuda.Stream, event: Event) -> None:
    if not isinstance(event, CudaEvent):
        raise TypeError("an event of another device")
    event.hold_up(stream)

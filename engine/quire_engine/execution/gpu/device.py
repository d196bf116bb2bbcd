"""What the GPU runner asks of a device: one stream of work, copies to and from the host, lanes, events, graphs.

Promises: everything issued inside `work`, and everything issued to one lane, happens on the device in the order it was
issued; between them only events make an order; only `Event.wait` and `capture` make the host wait.
Must not know: torch.cuda, models, steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


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
        """Copy from a host buffer. Nobody waits for it but who follows an event behind it."""
        ...

    def fetch(self, source: Tensor, target: Tensor) -> None:
        """Copy to a host buffer."""
        ...

    def follow(self, event: Event) -> None:
        """What is issued to the lane from now on is done after everything before the event."""
        ...

    def record(self) -> Event:
        """An event behind everything that was issued to the lane."""
        ...


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Issue it again, on the addresses of the capture. What it allocated itself holds until the next replay."""
        ...


class Device(Protocol):
    """One device with one stream of work."""

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
        """What is issued to the stream from now on is done after everything before a lane's event."""
        ...

    def capture(self, body: Callable[[], None]) -> Graph:
        """What `body` issues, not done but kept. Raises torch.OutOfMemoryError, or RuntimeError for what no graph can
        hold; the device can go on then."""
        ...

    def borrow(self, tensor: Tensor) -> Tensor:
        """The same memory without keeping it: of a contiguous tensor that a capture allocated.

        Graphs that keep their results have memory of their own for them; those that borrow share it.
        """
        ...

    def release(self) -> None:
        """Give back memory that nobody uses."""
        ...

"""Several processes that compute one model: how each gets the columns that the others have computed.

Every rank computes whole outputs, columns of each matrix and whole heads, and none adds partial sums. So the bits do
not depend on the number of ranks. Must not know: the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_WHOLE = 16  # columns: addresses of their values are multiples of what kernels load at once


class RankLost(RuntimeError):
    """Another rank has ended or stopped, or has computed something else: this one cannot go on."""


@contextmanager
def computed_by_all(what: str) -> Iterator[None]:
    """All ranks compute the body. An error in it leaves the others in an exchange that never ends: it is RankLost."""
    try:
        yield
    except RankLost:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise RankLost(f"rank 0 has left {what}: {reason}") from error


class Collective(Protocol):
    """The exchange between the ranks of a model. All of them call the same functions in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, data: Tensor, starts: Sequence[int]) -> None:
        """Complete `data`, contiguous uint8 [T, B], of which this rank's columns starts[rank] .. starts[rank + 1] - 1
        are there.

        Raises RankLost.
        """
        ...

    def broadcast(self, data: bytes | None) -> bytes:
        """Give all ranks the data of rank 0; the others give None, and wait for it however long. Raises RankLost."""
        ...

    def waited(self) -> tuple[float, ...]:
        """Return the seconds for which each rank has waited in exchanges for the others, as far as they are known here.

        The time until rank 0 says what to do is none of it. The slowest rank waits least.
        """
        ...


class DeviceCollective(Protocol):
    """The exchange between the ranks of a model on the devices that compute it, issued to the stream of their work.

    The host waits for none of it, and a CUDA graph may hold it. All ranks issue the same calls in the same order.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def parts(self, own: Tensor) -> Tensor:
        """`own`, contiguous and of one shape in all ranks: [size, *own.shape], by rank. Raises RankLost."""
        ...

    def share(self, values: Tensor) -> None:
        """Write rank 0's values into those of all others, contiguous and of one shape. Raises RankLost."""
        ...


def columns_of(rank: int, size: int, count: int) -> slice:
    """The columns of a matrix's `count` that one of `size` ranks computes: all have equally many, but for the last.

    >>> columns_of(1, 2, 1024), columns_of(3, 4, 50257)
    (slice(512, 1024, None), slice(37728, 50257, None))
    """
    width = widest_share(size, count)
    return slice(min(count, rank * width), min(count, (rank + 1) * width))


def widest_share(size: int, count: int) -> int:
    """The number of columns of every rank but the last: of whole rows of 16, where the last one then has some left."""
    width = -(-count // size)
    rounded = -(-width // _WHOLE) * _WHOLE
    return rounded if rounded * (size - 1) < count else width


class TorchDistributed:
    """See `Collective` and `DeviceCollective`: by a process group of torch.distributed, of NCCL over GPUs, or of Gloo,
    which may reach over hosts.

    The exchange between hosts' memories is slow on one machine, where it is the reference for shared memory.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        """`device`: where the group's tensors lie; None: in host memory."""
        self._group, self._device = group, device or torch.device("cpu")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._waited = torch.zeros(self.size, dtype=torch.int64)  # nanoseconds, of the others as of the last exchange

    def waited(self) -> tuple[float, ...]:
        """Return each rank's waited seconds, with the transport's own time, which the calls do not tell apart."""
        return tuple([each / 1e9 for each in self._waited.tolist()])

    def gather(self, data: Tensor, starts: Sequence[int]) -> None:
        widths = [end - start for start, end in pairwise(starts)]
        own_waited = self._waited[self.rank : self.rank + 1].view(torch.uint8)
        # Gloo takes parts of one size only. The last row tells how long the rank has waited.
        own = torch.zeros(len(data) + 1, max(*widths, len(own_waited)), dtype=torch.uint8, device=self._device)
        own[:-1, : widths[self.rank]] = data[:, starts[self.rank] : starts[self.rank + 1]]
        own[-1, : len(own_waited)] = own_waited
        parts = [torch.empty_like(own) for _ in widths]
        began = time.monotonic_ns()
        with self._lost():
            dist.all_gather(parts, own, group=self._group)
        for rank, part in enumerate(parts):
            data[:, starts[rank] : starts[rank + 1]] = part[:-1, : widths[rank]]
            self._waited[rank : rank + 1].view(torch.uint8)[:] = part[-1, : len(own_waited)]
        self._waited[self.rank] += time.monotonic_ns() - began

    def parts(self, own: Tensor) -> Tensor:
        found = own.new_empty(self.size, *own.shape)
        # torch 2.13 has another name for it, and says so wherever the old one is used.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._lost():
            gather(found.view(-1), own.view(-1), group=self._group)
        return found

    def share(self, values: Tensor) -> None:
        with self._lost():
            dist.broadcast(values, group=self._group, group_src=0)

    def broadcast(self, data: bytes | None) -> bytes:
        size = torch.tensor([len(data or b"")], device=self._device)
        with self._lost():
            dist.broadcast(size, group=self._group, group_src=0)
            told = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            if data:
                told[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(told, group=self._group, group_src=0)
        return told.cpu().numpy().tobytes()

    @contextmanager
    def _lost(self) -> Iterator[None]:
        """Raise RankLost for what torch raises when another rank has ended."""
        try:
            yield
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} has lost another one: {error}") from error

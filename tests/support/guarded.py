"""Memory that shows who touches what is not theirs: new tensors hold poison and lie between guards.

Promises: within `guarded()` whatever torch.empty and its relatives hand out is NaN, or a large negative integer, until
written, and writing before or after it is found at the end. Must not know: any kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

DEVICE = torch.device(os.environ.get("QUIRE_TRITON_DEVICE", "cpu"))  # of the Triton kernels' tests
_GUARD = 1024  # elements on either side: programs run over by less than a tile's row
_POISON = -77


def poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else _POISON


def between_guards(x: torch.Tensor) -> torch.Tensor:
    """A copy of x on the tests' device, with poison before and after it: reading past its ends gives NaN."""
    room = _room(x.shape, x.dtype, DEVICE)
    return _middle(room, x.shape).copy_(x)


@contextmanager
def guarded() -> Iterator[None]:
    """AssertionError at the end where something was written outside of what was handed out."""
    rooms: list[torch.Tensor] = []

    def empty(*size, dtype: torch.dtype | None = None, device: object = None, **_: object) -> torch.Tensor:
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        rooms.append(_room(shape, dtype or torch.get_default_dtype(), torch.device(device or "cpu")))
        return _middle(rooms[-1], shape)

    def new_empty(self: torch.Tensor, *size, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
        return empty(*size, dtype=dtype or self.dtype, device=self.device)

    def empty_like(x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
        return empty(*x.shape, dtype=dtype or x.dtype, device=x.device)

    with (
        patch.object(torch, "empty", empty),
        patch.object(torch, "empty_like", empty_like),
        patch.object(torch.Tensor, "new_empty", new_empty),
    ):
        yield
    for room in rooms:
        for side in (room[:_GUARD], room[-_GUARD:]):
            untouched = side.isnan() if side.dtype.is_floating_point else side == poison(side.dtype)
            assert bool(untouched.all()), f"written outside of a {room.dtype} tensor of {len(room) - 2 * _GUARD}"


def _room(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((shape.numel() + 2 * _GUARD,), poison(dtype), dtype=dtype, device=device)


def _middle(room: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return room[_GUARD : _GUARD + shape.numel()].view(shape)

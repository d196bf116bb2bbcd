"""Where sampled tokens lie: on the device for the step that follows, and in a host buffer for whoever collects.

Promises: a step that is computed twice, whole and then item by item, finds the ids of the step before unchanged.
Must not know: how tokens are chosen, what a step sends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.execution.gpu.device import HostBuffer
from quire_engine.execution.gpu.packed_input import aligned

_ID, _FLAG = 8, 1  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What one step leaves behind, for up to n rows of choices."""

    first_word: int  # of `ids`, counted in the words of the device's buffer
    bytes: Tensor  # all of it, uint8
    ids: Tensor  # [n] int64; a token of the vocabulary whatever the flags are
    finite: Tensor  # [n] bool
    possible: Tensor  # [n] bool


def region_bytes(max_rows: int) -> int:
    return aligned(max_rows * (_ID + 2 * _FLAG))


def region_at(buffer: Tensor, offset: int, max_rows: int) -> Region:
    """The region that begins at a byte of the device's buffer [n] uint8."""
    held = buffer[offset : offset + region_bytes(max_rows)]
    finite, possible, end = (max_rows * size for size in (_ID, _ID + _FLAG, _ID + 2 * _FLAG))
    return Region(
        first_word=offset // _ID,
        bytes=held,
        ids=held[:finite].view(torch.int64),
        finite=held[finite:possible].view(torch.bool),
        possible=held[possible:end].view(torch.bool),
    )


def read_region(buffer: HostBuffer, max_rows: int, first: int, num_rows: int) -> tuple[list[int], bytes, bytes]:
    """Ids and flags of some rows, from a copy of a region."""
    finite, possible = max_rows * _ID + first, max_rows * (_ID + _FLAG) + first
    return (
        buffer.bytes[first * _ID : (first + num_rows) * _ID].cast("q").tolist(),
        bytes(buffer.bytes[finite : finite + num_rows]),
        bytes(buffer.bytes[possible : possible + num_rows]),
    )

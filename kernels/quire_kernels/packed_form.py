"""Packed matrices as plain memory, for weights in files that several processes map.

Promises: a restored matrix computes the same bits as the packed one; memory that cannot be a packed matrix is refused.
Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire_kernels.stored import StoredMatrix

Allocate = Callable[
    [int], Tensor
]  # a number of bytes -> uint8 of that many, zeroed, 64-byte aligned, kept by the tensor
PackLinear = Callable[[Tensor, Tensor | None], Any]  # as in `KernelSet`
PackGateUp = Callable[[Tensor, Tensor, Tensor | None], Any]
PackStored = Callable[[Sequence[Sequence[StoredMatrix]], Tensor | None], Any | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """How a kernel set packs, stores and restores its matrices.

    packer(allocate) -> pack_linear and pack_gate_up, which take all memory for a matrix from `allocate`
        They read the tensors that they are given and keep none.
    stored_packer(allocate) -> pack_stored, likewise
    most_bytes(rows, columns) -> int
        An upper bound on the bytes of one matrix of that size, alignment included.
    facts(weight) -> numbers that describe the matrix, and parts(weight) -> its memory by names
    restore(facts, parts) -> weight
        From the same memory, as uint8 and perhaps read-only, in another process. ValueError if it is not a matrix.
    all_finite(values) -> bool
        Whether no value of a bfloat16 CPU tensor is infinite or NaN.
    checksum(address, num_bytes) -> int
        64 bits; releases the GIL, so that threads can check in parallel.
    """

    name: str  # all that the bytes depend on except the weights: version, instruction set, kind
    packer: Callable[[Allocate], tuple[PackLinear, PackGateUp]]
    stored_packer: Callable[[Allocate], PackStored]
    most_bytes: Callable[[int, int], int]
    facts: Callable[[Any], dict[str, int]]
    parts: Callable[[Any], dict[str, Tensor]]
    restore: Callable[[Mapping[str, int], Mapping[str, Tensor]], Any]
    all_finite: Callable[[Tensor], bool]
    checksum: Callable[[int, int], int]

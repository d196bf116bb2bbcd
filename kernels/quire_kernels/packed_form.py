"""Packed matrices as plain memory: for kernels whose weights may lie in files and be mapped by process after process.

Promises: what is restored computes the same bits as what was packed; memory that cannot be a packed matrix is refused.
Must not know: the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Allocate = Callable[
    [int], Tensor
]  # a number of bytes -> uint8 of that many, zeroed, 64-byte aligned, kept by the tensor
PackLinear = Callable[[Tensor, Tensor | None], Any]  # as in `KernelSet`
PackGateUp = Callable[[Tensor, Tensor, Tensor | None], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """What a kernel set says of the matrices that it packs.

    packer(allocate) -> pack_linear and pack_gate_up, which take all memory that a matrix needs from `allocate`
        They read the tensors that they are given and keep none.
    most_bytes(rows, columns) -> int
        What one matrix of that size may take, all of its memory and alignment included.
    facts(weight) -> numbers that tell what the matrix is, and parts(weight) -> its memory by names
    restore(facts, parts) -> weight
        From the same memory, as uint8 and perhaps read-only, in another process. ValueError where it cannot be that.
    all_finite(values) -> bool
        Of a bfloat16 tensor on the CPU: no value is infinite or not a number.
    checksum(address, num_bytes) -> int
        Of memory, 64 bits; releases the interpreter, so that threads check beside each other.
    """

    name: str  # all that the bytes depend on beside the weights: version, instruction set, kind
    packer: Callable[[Allocate], tuple[PackLinear, PackGateUp]]
    most_bytes: Callable[[int, int], int]
    facts: Callable[[Any], dict[str, int]]
    parts: Callable[[Any], dict[str, Tensor]]
    restore: Callable[[Mapping[str, int], Mapping[str, Tensor]], Any]
    all_finite: Callable[[Tensor], bool]
    checksum: Callable[[int, int], int]

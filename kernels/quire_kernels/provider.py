"""What a kernel set says of itself before it is made: `Provider`.

Promises: asking one imports nothing heavy and compiles nothing; only `make` does.
Must not know: which providers there are, the engine, the server, the environment.
"""

from __future__ import annotations

from typing import Protocol

import torch

from quire_kernels.kernel_set import KernelSet, KVFormat, Quantization


class Unavailable(RuntimeError):
    """This machine lacks what kernels need that could serve; the text completes "the NAME kernels"."""


class Provider(Protocol):
    """One implementation of the ops."""

    name: str  # of the kernel set, and what an operator asks for
    devices: tuple[str, ...]  # the kinds of device it computes on, by torch's names

    def why_not(
        self, device: torch.device, dtype: torch.dtype, quantization: Quantization | None, kv: KVFormat
    ) -> str | None:
        """Why it cannot serve such a model on one of its `devices`; None if it can.

        For an operator: a clause that completes "the NAME kernels", with what would work in parentheses.
        """
        ...

    def make(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        kv: KVFormat,
        *,
        threads: int | None,
    ) -> KernelSet:
        """What `why_not` has nothing against; imports what it takes. Raises Unavailable.

        `threads`: of workers of its own, if it has such; None is one per usable core.
        """
        ...

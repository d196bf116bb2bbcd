"""The requirements on a kernel set (`Requirements`), and an implementation that can make one (`Provider`).

Promises: only `make` imports heavy modules or compiles. Must not know: the engine, the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from quire_kernels.kernel_set import KernelSet, KVFormat, Quantization

# The implementation of attention: the set's own choice, the Triton kernels, or a library of flash attention.
AttentionChoice = Literal["auto", "triton", "flash-attn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """The requirements of a model, a device and an operator on a kernel set."""

    device: torch.device
    dtype: torch.dtype  # of the activations
    kv: KVFormat
    quantization: Quantization | None = None  # of the weights
    deterministic: bool = False  # a row's bits must not depend on the other rows of a call
    attention: AttentionChoice = "auto"
    on_compiled: Callable[[int, int], None] | None = None  # called with (compiled files, all files) while compiling
    threads: int | None = None  # worker threads, if the set has its own; None: one per usable core
    cpu_variant: str | None = None  # instruction set, for kernels with several; None: the fastest
    left_out: tuple[str, ...] = ()  # optional paths (`optional_paths`) that the device has not shown


class Unavailable(RuntimeError):
    """A lack of something that the kernels need on this machine; the text completes "the NAME kernels"."""


def own_attention_only(required: Requirements) -> str | None:
    """`Provider.why_not` for a set that has no other attention than its own."""
    if required.attention == "auto":
        return None
    return f"compute attention by themselves, not by {required.attention} (set attention to auto)"


def no_variants(required: Requirements) -> str | None:
    """`Provider.why_not` for a set without variants for CPU instruction sets."""
    if required.cpu_variant is None:
        return None
    return f"are not compiled for {required.cpu_variant} (leave cpu_variant out)"


class Provider(Protocol):
    """One implementation of the ops."""

    name: str  # the kernel set's name, by which operators choose it
    devices: tuple[str, ...]  # supported kinds of device, by torch's names

    def why_not(self, required: Requirements) -> str | None:
        """Why it cannot meet the requirements on one of its `devices`; None if it can.

        For operators: a clause that completes "the NAME kernels", with a remedy in parentheses.
        """
        ...

    def make(self, required: Requirements) -> KernelSet:
        """Make the kernel set, after `why_not` returned None; may import heavy modules. Raises Unavailable."""
        ...

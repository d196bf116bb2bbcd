"""What is required of a kernel set, and what one says of itself before it is made: `Requirements` and `Provider`.

Promises: asking one imports nothing heavy and compiles nothing; only `make` does. Must not know: the engine, the
server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from quire_kernels.kernel_set import KernelSet, KVFormat, Quantization

# Who computes attention: the set as it sees fit, the Triton kernels, or a library of flash attention.
AttentionChoice = Literal["auto", "triton", "flash-attn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What a model, a device and an operator require of a kernel set."""

    device: torch.device
    dtype: torch.dtype  # of the activations
    kv: KVFormat
    quantization: Quantization | None = None  # of the weights
    deterministic: bool = False  # a row's bits must not depend on the other rows of a call
    attention: AttentionChoice = "auto"
    on_compiled: Callable[[int, int], None] | None = None  # told how many files of how many are compiled, if any are
    threads: int | None = None  # of workers of its own, if it has such; None is one per usable core
    cpu_variant: str | None = None  # the instruction set, of kernels that are compiled for several; None: the fastest


class Unavailable(RuntimeError):
    """This machine lacks what kernels need that could serve; the text completes "the NAME kernels"."""


def own_attention_only(required: Requirements) -> str | None:
    """`Provider.why_not` of a set whose attention is its own."""
    if required.attention == "auto":
        return None
    return f"compute attention by themselves, not by {required.attention} (set attention to auto)"


def no_variants(required: Requirements) -> str | None:
    """`Provider.why_not` of a set that is compiled for no instruction set of a CPU."""
    if required.cpu_variant is None:
        return None
    return f"are not compiled for {required.cpu_variant} (leave cpu_variant out)"


class Provider(Protocol):
    """One implementation of the ops."""

    name: str  # of the kernel set, and what an operator asks for
    devices: tuple[str, ...]  # the kinds of device it computes on, by torch's names

    def why_not(self, required: Requirements) -> str | None:
        """Why it cannot serve this on one of its `devices`; None if it can.

        For an operator: a clause that completes "the NAME kernels", with what would work in parentheses.
        """
        ...

    def make(self, required: Requirements) -> KernelSet:
        """What `why_not` has nothing against; imports what it takes. Raises Unavailable."""
        ...

"""Chooses the kernel sets that a device would serve with, and the checks of each.

Promises: the set for the model's dtype gets all checks, also with every format of weights and pool that it supports;
the sets for other dtypes get all checks if they are the same set on a GPU, otherwise a few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch

from quire_engine.config import KernelChoice
from quire_engine.errors import ConfigError
from quire_engine.execution.kernel_checks import choice_checks
from quire_kernels.kernel_set import KernelSet, KVFormat, KVType, Quantization
from quire_kernels.reference import REFERENCE
from quire_kernels.select import AUTO, select
from quire_kernels.verify.checks import (
    ROWS,
    ModelSizes,
    attention_checks,
    linear_checks,
    other_heads,
    short_checks,
)
from quire_kernels.verify.findings import Check, Subject

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedSet:
    """One kernel set and its checks, which are built lazily."""

    subject: Subject
    checks: Iterator[Check]


def checked_sets(
    device: torch.device,
    dtype: torch.dtype,
    choice: KernelChoice,
    sizes: ModelSizes,
    threads: int,
    *,
    deterministic: bool,
) -> Iterator[CheckedSet]:
    """All kernel sets to check; `dtype` is the model's. Raises ConfigError if `choice` does not support it."""

    def make(
        kind: torch.dtype, name: str, quantization: Quantization | None = None, kv_type: KVType = "auto"
    ) -> KernelSet:
        heads = sizes.heads
        kv = KVFormat(head_dim=heads.head_dim, block_size=heads.block_size, kv_type=kv_type)
        return select(
            device, kind, name, kv=kv, quantization=quantization, deterministic=deterministic, threads=threads
        )

    def subject(
        kernels: KernelSet, kind: torch.dtype, quantization: Quantization | None = None, kv_type: KVType = "auto"
    ) -> Subject:
        return Subject(
            kernels=kernels,
            device=device,
            dtype=kind,
            quantization=quantization,
            kv_type=kv_type,
            alone=deterministic or device.type == "cpu",
        )

    try:
        first = make(dtype, choice)
    except ValueError as error:
        raise ConfigError(f"kernels={choice}: {error}") from None
    whole = subject(first, dtype)
    yield CheckedSet(subject=whole, checks=_all(whole, sizes))
    for quantization in get_args(Quantization):
        try:
            one = subject(make(dtype, first.name, quantization=quantization), dtype, quantization=quantization)
        except ValueError:
            continue
        yield CheckedSet(subject=one, checks=linear_checks(one, sizes))
    for kv_type in get_args(KVType):
        if kv_type != "auto":
            try:
                one = subject(make(dtype, first.name, kv_type=kv_type), dtype, kv_type=kv_type)
            except ValueError:
                continue
            yield CheckedSet(subject=one, checks=_pools(one, sizes))
    names = dict.fromkeys((first.name, REFERENCE.name)) if choice == AUTO else (choice,)
    for kind in _DTYPES:
        for name in names if kind != dtype else ():
            try:
                other = subject(make(kind, name), kind)
            except ValueError:
                continue
            same = other.kernels.name == first.name and device.type != "cpu"
            yield CheckedSet(subject=other, checks=_all(other, sizes) if same else short_checks(other, sizes))
            break


def _all(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    yield from linear_checks(subject, sizes)
    yield from choice_checks(subject, sizes.vocabulary, ROWS)
    yield from _pools(subject, sizes)


def _pools(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    yield from attention_checks(subject, sizes.heads, own=True)
    for heads in other_heads():
        kv = KVFormat(head_dim=heads.head_dim, block_size=heads.block_size, kv_type=subject.kv_type)
        try:
            select(subject.device, subject.dtype, subject.kernels.name, kv=kv, threads=1)
        except ValueError:  # a set may support fewer shapes
            continue
        yield from attention_checks(subject, heads, own=False)

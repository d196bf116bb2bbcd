"""Chooses the kernel sets that a device would serve with, and the checks of each.

Promises: the set for the model's dtype gets all checks, also with every format of weights and pool that it supports;
without its optional paths it gets a few. The sets for other dtypes get all checks if they are the same set on a GPU,
otherwise a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

import torch

from quire_engine.contract.config import KernelChoice
from quire_engine.contract.errors import ConfigError
from quire_engine.execution.gpu.device import CudaDevice, capture_on
from quire_engine.execution.kernel_checks import choice_checks
from quire_kernels.kernel_set import KVFormat, KVType, Quantization
from quire_kernels.optional_paths import GRAPHS, NAMES
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
from quire_kernels.verify.paths import path_checks

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

    maker = _Maker(device=device, sizes=sizes, threads=threads, deterministic=deterministic)
    try:
        whole = maker.subject(dtype, choice)
    except ValueError as error:
        raise ConfigError(f"kernels={choice}: {error}") from None
    yield CheckedSet(subject=whole, checks=_all(whole, sizes))
    first = whole.kernels
    if first.optional:
        plain = maker.subject(dtype, first.name, left_out=NAMES)
        plain = replace(plain, kernels=replace(plain.kernels, name=f"{first.name}, plain"))
        yield CheckedSet(subject=plain, checks=short_checks(plain, sizes))
    for quantization in get_args(Quantization):
        with suppress(ValueError):
            one = maker.subject(dtype, first.name, quantization=quantization)
            yield CheckedSet(subject=one, checks=linear_checks(one, sizes))
    for kv_type in get_args(KVType):
        if kv_type != "auto":
            with suppress(ValueError):
                one = maker.subject(dtype, first.name, kv_type=kv_type)
                yield CheckedSet(subject=one, checks=_pools(one, sizes))
    names = dict.fromkeys((first.name, REFERENCE.name)) if choice == AUTO else (choice,)
    for kind in _DTYPES:
        for name in names if kind != dtype else ():
            try:
                other = maker.subject(kind, name)
            except ValueError:
                continue
            same = other.kernels.name == first.name and device.type != "cpu"
            yield CheckedSet(subject=other, checks=_all(other, sizes) if same else short_checks(other, sizes))
            break


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    """Makes kernel sets for one device and model."""

    device: torch.device
    sizes: ModelSizes
    threads: int
    deterministic: bool

    def subject(
        self,
        dtype: torch.dtype,
        name: str,
        *,
        quantization: Quantization | None = None,
        kv_type: KVType = "auto",
        left_out: Sequence[str] = (),
    ) -> Subject:
        """The set of this name. Raises ValueError where it does not support that."""
        heads = self.sizes.heads
        kernels = select(
            self.device,
            dtype,
            name,
            kv=KVFormat(head_dim=heads.head_dim, block_size=heads.block_size, kv_type=kv_type),
            quantization=quantization,
            deterministic=self.deterministic,
            threads=self.threads,
            left_out=left_out,
        )
        return Subject(
            kernels=kernels,
            device=self.device,
            dtype=dtype,
            quantization=quantization,
            kv_type=kv_type,
            alone=self.deterministic or self.device.type == "cpu",
        )


def _all(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    yield from linear_checks(subject, sizes)
    yield from choice_checks(subject, sizes.vocabulary, ROWS)
    yield from _pools(subject, sizes)
    if GRAPHS in subject.kernels.optional:
        yield from path_checks(GRAPHS, subject, sizes, capture_on(lambda: CudaDevice(subject.device)))


def _pools(subject: Subject, sizes: ModelSizes) -> Iterator[Check]:
    yield from attention_checks(subject, sizes.heads, own=True)
    for heads in other_heads():
        kv = KVFormat(head_dim=heads.head_dim, block_size=heads.block_size, kv_type=subject.kv_type)
        try:
            select(subject.device, subject.dtype, subject.kernels.name, kv=kv, threads=1)
        except ValueError:  # a set may support fewer shapes
            continue
        yield from attention_checks(subject, heads, own=False)

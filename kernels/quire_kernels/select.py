"""The choice among the kernel sets that there are.

Promises: `auto` takes the fastest that can serve and can be made, and tells which faster one it had to pass over; a
refusal says why and what would work. Must not know: what a kernel set needs, the engine, the server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from quire_kernels.cpu.provider import CpuProvider
from quire_kernels.kernel_set import KernelSet, KVFormat, Quantization
from quire_kernels.provider import Provider, Unavailable
from quire_kernels.reference.provider import ReferenceProvider

_log = logging.getLogger(__name__)

AUTO = "auto"
PROVIDERS: tuple[Provider, ...] = (CpuProvider(), ReferenceProvider())  # the fastest first


def select(
    device: torch.device,
    dtype: torch.dtype,
    choice: str = AUTO,
    *,
    kv: KVFormat,
    quantization: Quantization | None = None,
    threads: int | None = None,
    providers: Sequence[Provider] = PROVIDERS,
) -> KernelSet:
    """The kernel set for such a model: the fastest ("auto"), or the one of that name. ValueError if it cannot serve.

    `threads`: of a set with workers of its own; None is one per usable core.
    """
    names = (AUTO, *(each.name for each in providers))
    if choice not in names:
        raise ValueError(f"there are no {choice} kernels; set kernels to one of {', '.join(names)}")
    refusals: list[str] = []
    passed_over: list[str] = []
    for each in providers:
        if choice not in (AUTO, each.name):
            continue
        reason = _why_not(each, device, dtype, quantization, kv)
        if reason is None:
            try:
                kernels = each.make(device, dtype, quantization, kv, threads=threads)
            except Unavailable as error:
                reason = str(error)
            else:
                if passed_over:
                    _log.warning("serving with the slower %s kernels: %s", each.name, "; ".join(passed_over))
                return kernels
        refusals.append(f"the {each.name} kernels {reason}")
        if device.type in each.devices:  # kernels for other devices are no loss
            passed_over.append(refusals[-1])
    others = (each for each in providers if choice not in (AUTO, each.name))
    if any(_why_not(each, device, dtype, quantization, kv) is None for each in others):
        refusals.append("set kernels to auto to take others")
    raise ValueError("; ".join(refusals))


def _why_not(
    provider: Provider,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization | None,
    kv: KVFormat,
) -> str | None:
    if device.type not in provider.devices:
        return f"compute on {' or '.join(provider.devices)}, not on {device.type} (set device to {provider.devices[0]})"
    return provider.why_not(device, dtype, quantization, kv)

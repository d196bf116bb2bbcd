"""Chooses among the available kernel sets.

Promises: `auto` takes the fastest set that meets the requirements and can be made, and logs faster ones that it
skipped; a refusal has the reason and a remedy. Must not know: the engine, the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from quire_kernels.cpu.provider import CpuProvider
from quire_kernels.kernel_set import KernelSet, KVFormat, Quantization
from quire_kernels.provider import AttentionChoice, Provider, Requirements, Unavailable
from quire_kernels.reference.provider import ReferenceProvider
from quire_kernels.triton.provider import TritonProvider

_log = logging.getLogger(__name__)

AUTO = "auto"
PROVIDERS: tuple[Provider, ...] = (CpuProvider(), TritonProvider(), ReferenceProvider())  # the fastest first


def select(
    device: torch.device,
    dtype: torch.dtype,
    choice: str = AUTO,
    *,
    kv: KVFormat,
    quantization: Quantization | None = None,
    deterministic: bool = False,
    attention: AttentionChoice = "auto",
    threads: int | None = None,
    cpu_variant: str | None = None,
    on_compiled: Callable[[int, int], None] | None = None,
    beside: KernelSet | None = None,
    left_out: Sequence[str] = (),
    providers: Sequence[Provider] = PROVIDERS,
) -> KernelSet:
    """The fastest kernel set ("auto") for such a model, or the one with that name. ValueError if it cannot serve.

    `deterministic`: no row's bits may depend on the other rows of a call, as is always the case on a CPU. `attention`:
    its implementation. `threads`: for a set with workers of its own; None: one per usable core. `cpu_variant`: the
    instruction set of a CPU; None: the fastest. `beside`: a set made for another model with the same settings, which is
    taken if it is the one, so that both compute with the same workers. `left_out`: optional paths that must not serve.
    """
    required = Requirements(
        device=device,
        dtype=dtype,
        kv=kv,
        quantization=quantization,
        deterministic=deterministic,
        attention=attention,
        threads=threads,
        cpu_variant=cpu_variant,
        on_compiled=on_compiled,
        left_out=tuple(left_out),
    )
    names = (AUTO, *(each.name for each in providers))
    if choice not in names:
        raise ValueError(f"there are no {choice} kernels; set kernels to one of {', '.join(names)}")
    refusals: list[str] = []
    passed_over: list[str] = []
    for each in providers:
        if choice not in (AUTO, each.name):
            continue
        reason = _why_not(each, required)
        if reason is None and beside is not None and beside.name == each.name:
            return beside
        if reason is None:
            try:
                kernels = each.make(required)
            except Unavailable as error:
                reason = str(error)
            else:
                if passed_over:
                    _log.warning("serving with the slower %s kernels: %s", each.name, "; ".join(passed_over))
                return kernels
        refusals.append(f"the {each.name} kernels {reason}")
        if device.type in each.devices:  # kernels for other devices are not worth a warning
            passed_over.append(refusals[-1])
    others = (each for each in providers if choice not in (AUTO, each.name))
    if any(_why_not(each, required) is None for each in others):
        refusals.append("set kernels to auto to take others")
    raise ValueError("; ".join(refusals))


def _why_not(provider: Provider, required: Requirements) -> str | None:
    device, served = required.device.type, provider.devices
    if device not in served:
        return f"compute on {' or '.join(served)}, not on {device} (set device to {served[0]})"
    return provider.why_not(required)

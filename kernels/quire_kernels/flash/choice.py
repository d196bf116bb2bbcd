"""Replaces a kernel set's attention by a library's: `with_flash_attention`.

Promises: it takes the first library that can serve and passes a trial on a small step; a refusal has the reason of each
library. Must not know: the engine, the server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from quire_kernels.flash import trial
from quire_kernels.flash.attention import FlashAttention
from quire_kernels.flash.fa3_fwd import Fa3Fwd
from quire_kernels.flash.flash_attn_2 import FlashAttn2
from quire_kernels.flash.flash_attn_3 import FlashAttn3
from quire_kernels.flash.library import Library
from quire_kernels.flash.torch_varlen import TorchVarlen
from quire_kernels.kernel_set import KernelSet, KVFormat
from quire_kernels.provider import Unavailable

_log = logging.getLogger(__name__)

LIBRARIES: tuple[Library, ...] = (FlashAttn3(), Fa3Fwd(), FlashAttn2(), TorchVarlen())
DTYPES = (torch.bfloat16, torch.float16)


def with_flash_attention(
    kernels: KernelSet,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv: KVFormat,
    capability: tuple[int, int],
    deterministic: bool = False,
    libraries: Sequence[Library] = LIBRARIES,
) -> KernelSet:
    """The set with another attention. Raises Unavailable with a clause that completes "the NAME kernels".

    `capability`: the GPU's, (major, minor). `deterministic`: whether a row's bits must not depend on its batch.
    """
    refusals = _refusals(dtype, kv, deterministic)
    for library in () if refusals else libraries:
        reason = library.why_not(kv, capability)
        if reason is None:
            try:
                loaded = library.load()
                reason = trial.why_it_fails(loaded, device=device, dtype=dtype, kv=kv)
            except Unavailable as error:
                reason = str(error)
            else:
                if reason is None:
                    _log.info("attention is computed by %s (version %s)", library.name, loaded.version)
                    ops = FlashAttention(loaded, kernels.attention)
                    name = f"{kernels.name}+{library.name}"
                    # The calls of a step depend on the lengths of its sequences.
                    return replace(
                        kernels, attention=ops.attention, bounded_attention=False, bind_decodes=None, name=name
                    )
        refusals.append(f"{library.name} {reason}")
    raise Unavailable(f"cannot take attention from flash-attn: {'; '.join(refusals)} (or set attention to auto)")


def _refusals(dtype: torch.dtype, kv: KVFormat, deterministic: bool) -> list[str]:
    """Reasons that hold for every library."""
    if deterministic:
        return ["its results depend on what else is computed (leave deterministic out)"]
    if kv.kv_type != "auto":
        return [f"it reads keys and values in the model's dtype, not in {kv.kv_type} (set kv_cache_dtype to auto)"]
    if dtype not in DTYPES:
        return [
            f"it computes in bfloat16 or float16, not in {str(dtype).removeprefix('torch.')} (set dtype to bfloat16)"
        ]
    return []

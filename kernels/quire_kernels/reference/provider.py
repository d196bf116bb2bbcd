"""The provider of the reference kernels.

Promises: they serve every model on every device, in the dtypes that torch computes in.
"""

from __future__ import annotations

import torch

from quire_kernels.kernel_set import KernelSet
from quire_kernels.provider import Requirements, no_variants, own_attention_only
from quire_kernels.reference import REFERENCE


class ReferenceProvider:
    name = REFERENCE.name
    devices: tuple[str, ...] = ("cpu", "cuda")

    def why_not(self, required: Requirements) -> str | None:
        dtype, quantization, kv = required.dtype, required.quantization, required.kv
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"compute in float32, bfloat16 or float16, not in {str(dtype).removeprefix('torch.')}"
        if quantization is not None:
            return f"hold weights in the model's dtype, not in {quantization} (leave quantization out)"
        if kv.kv_type != "auto":
            return f"hold keys and values in the model's dtype, not in {kv.kv_type} (set kv_cache_dtype to auto)"
        if required.deterministic and required.device.type != "cpu":
            return "compute a row on a GPU in an order that depends on the others (leave deterministic out)"
        return own_attention_only(required) or no_variants(required)

    def make(self, required: Requirements) -> KernelSet:
        del required
        return REFERENCE

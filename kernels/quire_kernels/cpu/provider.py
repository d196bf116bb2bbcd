"""The provider of the C++ kernels.

Promises: reports unsupported requirements without compiling or loading anything.
"""

from __future__ import annotations

import torch

from quire_kernels.cpu.kv_layout import unsupported
from quire_kernels.kernel_set import KernelSet
from quire_kernels.provider import Requirements, Unavailable, own_attention_only


class CpuProvider:
    name = "cpu"
    devices: tuple[str, ...] = ("cpu",)

    def why_not(self, required: Requirements) -> str | None:
        dtype, kv = required.dtype, required.kv
        if dtype is not torch.bfloat16:
            return f"compute in bfloat16, not in {str(dtype).removeprefix('torch.')} (set dtype to bfloat16)"
        if kv.kv_type not in ("auto", "int8"):
            return f"hold keys and values in bfloat16 or int8, not in {kv.kv_type} (set kv_cache_dtype to int8)"
        reason = own_attention_only(required) or unsupported(head_dim=kv.head_dim, block_size=kv.block_size)
        return reason or _no_such_variant(required.cpu_variant)

    def make(self, required: Requirements) -> KernelSet:
        # Imported here: other providers do not need these modules.
        from quire_kernels.cpu.compiler import KernelBuildError  # noqa: PLC0415
        from quire_kernels.cpu.ops import cpu_kernel_set  # noqa: PLC0415

        try:
            return cpu_kernel_set(
                required.threads,
                required.quantization,
                kv_type="int8" if required.kv.kv_type == "int8" else "bf16",
                cpu_variant=required.cpu_variant,
                on_compiled=required.on_compiled,
            )
        except KernelBuildError as error:
            said = " ".join(str(error).split("\n")[:2])  # the compiler's first error
            raise Unavailable(f"are not available: {said}") from error


def _no_such_variant(name: str | None) -> str | None:
    if name is None:
        return None
    from quire_kernels.cpu.choice import UnusableVariant, usable  # noqa: PLC0415

    try:
        usable(name)
    except UnusableVariant as error:
        return str(error)
    return None

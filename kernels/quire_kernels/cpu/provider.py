"""The C++ kernels as one choice.

Promises: says what they cannot serve without compiling or loading anything.
Must not know: other providers.
"""

from __future__ import annotations

import torch

from quire_kernels.cpu.kv_layout import unsupported
from quire_kernels.kernel_set import KernelSet, KVFormat, Quantization
from quire_kernels.provider import Unavailable


class CpuProvider:
    name = "cpu"
    devices: tuple[str, ...] = ("cpu",)

    def why_not(
        self, device: torch.device, dtype: torch.dtype, quantization: Quantization | None, kv: KVFormat
    ) -> str | None:
        del device, quantization
        if dtype is not torch.bfloat16:
            return f"compute in bfloat16, not in {str(dtype).removeprefix('torch.')} (set dtype to bfloat16)"
        return unsupported(head_dim=kv.head_dim, block_size=kv.block_size)

    def make(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        kv: KVFormat,
        *,
        threads: int | None,
    ) -> KernelSet:
        # Imported here: a choice that falls on others need not load these.
        from quire_kernels.cpu.compiler import KernelBuildError  # noqa: PLC0415
        from quire_kernels.cpu.ops import cpu_kernel_set  # noqa: PLC0415

        del device, dtype
        try:
            return cpu_kernel_set(threads, quantization, kv_type="bf16" if kv.kv_type == "auto" else kv.kv_type)
        except KernelBuildError as error:
            raise Unavailable(f"are not available: {error}") from error

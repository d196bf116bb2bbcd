"""The provider of the Triton kernels.

Promises: reports unsupported requirements without importing Triton or initializing a GPU; `make` runs a kernel, so that
a machine without a working compiler is detected before the weights are read.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import re
import subprocess
import sysconfig
from pathlib import Path

import torch

from quire_kernels.kernel_set import KernelSet
from quire_kernels.provider import Requirements, Unavailable, no_variants
from quire_kernels.triton.pool import DTYPES, unsupported

LEAST_TRITON = (3, 6)
LEAST_CAPABILITY = (8, 0)  # bfloat16 on tensor cores
LEAST_AHEAD = (9, 0)  # programmatic dependent launch
WARP_GROUPS = (9, 10)  # major compute capabilities; 12.x has the instructions of 8.x
_DISTRIBUTIONS = ("triton", "pytorch-triton")  # the second one comes with torch's nightly builds
_OUT_OF_REACH = (errno.EACCES, errno.EPERM, errno.EROFS)


class TritonProvider:
    name = "triton"
    devices: tuple[str, ...] = ("cuda",)

    def why_not(self, required: Requirements) -> str | None:
        dtype, kv = required.dtype, required.kv
        if torch.version.hip is not None:
            return "are made for NVIDIA GPUs, and this torch for AMD's"
        if dtype not in DTYPES:
            return f"compute in bfloat16 or float16, not in {_name(dtype)} (set dtype to bfloat16)"
        if kv.kv_type not in ("auto", "fp8"):
            return (
                f"hold keys and values in the model's dtype or in fp8, not in {kv.kv_type} (set kv_cache_dtype to fp8)"
            )
        return no_variants(required) or _no_pool(required) or _no_triton()

    def make(self, required: Requirements) -> KernelSet:
        major, minor = _capability(required.device)
        if (major, minor) < LEAST_CAPABILITY:
            least = ".".join(map(str, LEAST_CAPABILITY))
            raise Unavailable(f"need a GPU of compute capability {least} or newer, this one has {major}.{minor}")
        try:
            _run_a_kernel(required.device)
        except Exception as error:  # errors of Triton, the C compiler, the driver, the file system
            raise Unavailable(f"are not available: {explained(error)}") from error
        # Imported here: only a set in use needs Triton or FlashAttention.
        from quire_kernels.flash.choice import with_flash_attention  # noqa: PLC0415
        from quire_kernels.triton.set import make_triton_set  # noqa: PLC0415

        kernels = make_triton_set(
            kv_type="fp8" if required.kv.kv_type == "fp8" else "auto",
            quantization=required.quantization,
            deterministic=required.deterministic,
            warp_groups=major in WARP_GROUPS,
            chained=not required.deterministic and (major, minor) >= LEAST_AHEAD,
            ahead=(major, minor) >= LEAST_AHEAD,
            left_out=required.left_out,
        )
        if required.attention != "flash-attn":
            return kernels
        return with_flash_attention(
            kernels,
            device=required.device,
            dtype=required.dtype,
            kv=required.kv,
            capability=(major, minor),
            deterministic=required.deterministic,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _no_pool(required: Requirements) -> str | None:
    kv, fp8 = required.kv, required.kv.kv_type == "fp8"
    reason = unsupported(head_dim=kv.head_dim, block_size=kv.block_size, dtype=required.dtype, fp8=fp8)
    if reason is None:
        return None
    plain = unsupported(head_dim=kv.head_dim, block_size=kv.block_size, dtype=required.dtype) is None
    return f"cannot hold this model's keys and values: {reason}" + (" (set kv_cache_dtype to auto)" if plain else "")


def _no_triton() -> str | None:
    least = ".".join(map(str, LEAST_TRITON))
    if importlib.util.find_spec("triton") is None:
        return f"need Triton {least} or newer, which is not installed (torch for CUDA brings it; pip install triton)"
    for distribution in _DISTRIBUTIONS:
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is not None and (int(numbers[1]), int(numbers[2])) < LEAST_TRITON:
            return f"need Triton {least} or newer, not {version} (torch 2.11 and newer for CUDA bring it)"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    try:
        return torch.cuda.get_device_capability(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        raise Unavailable(f"are not available: {explained(error)}") from error


def _run_a_kernel(device: torch.device) -> None:
    """Test all parts of a launch: Triton, ptxas, a C compiler and Python's headers, the driver, the cache directory."""
    import triton  # noqa: PLC0415

    from quire_kernels.triton.activation import gate_mul  # noqa: PLC0415
    from quire_kernels.triton.binaries import use_private_cache  # noqa: PLC0415

    if triton.knobs.runtime.interpret:
        raise RuntimeError("Triton was told to interpret its kernels (unset TRITON_INTERPRET)")
    use_private_cache()
    gate_mul(torch.zeros(1, 32, dtype=torch.bfloat16, device=device), "silu")
    torch.cuda.synchronize(device)


def explained(error: Exception) -> str:
    """The reason why no kernel can be launched, in one line, with the remedy if it is known."""
    said = str(error).strip() or type(error).__name__
    if "Failed to find C" in said:
        return "Triton finds no C compiler for what launches its kernels (install gcc, or set CC)"
    if isinstance(error, subprocess.CalledProcessError):
        compiler = error.cmd[0] if isinstance(error.cmd, list) else error.cmd
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
            return f"{compiler} finds no Python.h for what launches Triton's kernels (install python3-dev)"
        return f"{compiler} cannot compile what launches Triton's kernels: exit code {error.returncode}"
    if isinstance(error, OSError) and error.errno in _OUT_OF_REACH:
        return f"Triton cannot keep its binaries: {said} (set TRITON_CACHE_DIR to a folder that can be written)"
    return " ".join(said.splitlines()[0].split())

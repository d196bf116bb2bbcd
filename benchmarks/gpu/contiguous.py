"""Attention over a paged pool beside attention over keys and values in one piece.

Promises: the same sizes and the same types; what a library lacks is a row that says so. Must not know: how results are
shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module

import torch
import torch.nn.functional as F

from gpu.kernels import KernelBench, KernelSizes
from gpu.shapes import ModelShape
from gpu.timing import time_calls
from quire_engine.contract.config import KernelChoice
from quire_kernels.kernel_set import KVFormat
from quire_kernels.select import select

Row = dict[str, str | int | float]
# Functions of libraries for prompts, where they can be imported: q, k, v [tokens, heads, D] -> the same as q.
_LIBRARIES = (
    ("fa3_fwd_interface", "flash_attn_func"),
    ("flash_attn_interface", "flash_attn_func"),
    ("flash_attn", "flash_attn_func"),
)


def contiguous_rows(
    shape: ModelShape,
    device: torch.device,
    kernels: KernelChoice,
    *,
    decodes: Sequence[tuple[int, int]],
    prefills: Sequence[int],
    repeat: int,
) -> list[Row]:
    """Microseconds of one layer's attention: ours, torch's, and that of each library that is installed."""
    kernel_set = select(device, torch.bfloat16, kernels, kv=KVFormat(head_dim=shape.head_dim, block_size=16))
    sizes = KernelSizes(
        rows=(1,), decodes=tuple(decodes), prefills=tuple(prefills), operand_bytes=1 << 24, repeat=repeat
    )
    bench = KernelBench(kernel_set, shape, sizes, device)
    found: list[Row] = []
    for case in bench.attentions():
        with torch.inference_mode():
            timed = time_calls(case.work, device, calls=case.calls, repeat=repeat)
        found.append(
            {"how": f"{kernel_set.name}, paged", "what": case.name, "size": case.size, "us": timed.seconds * 1e6}
        )
    for count, context in decodes:
        found.append(_sdpa(shape, device, count, 1, context, repeat))
    for length in prefills:
        found.append(_sdpa(shape, device, 1, length, length, repeat))
        found += [_library(*names, shape, device, length, repeat) for names in _LIBRARIES]
    return found


def _sdpa(  # noqa: PLR0917 - a case
    shape: ModelShape, device: torch.device, count: int, rows: int, context: int, repeat: int
) -> Row:
    def made(heads: int, length: int) -> torch.Tensor:
        return torch.randn(count, heads, length, shape.head_dim, device=device).bfloat16()

    q, k, v = made(shape.heads, rows), made(shape.kv_heads, context), made(shape.kv_heads, context)

    def work(_: int) -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=rows > 1, enable_gqa=True)

    with torch.inference_mode():
        timed = time_calls(work, device, calls=4, repeat=repeat)
    what, size = (
        ("prefill attention", f"{rows} tokens") if rows > 1 else ("decode attention", f"{count} x {context} tokens")
    )
    return {"how": "torch, in one piece", "what": what, "size": size, "us": timed.seconds * 1e6}


def _library(  # noqa: PLR0917 - a case
    module: str, function: str, shape: ModelShape, device: torch.device, length: int, repeat: int
) -> Row:
    row: Row = {"how": f"{module}, in one piece", "what": "prefill attention", "size": f"{length} tokens"}
    try:
        attend: Callable[..., object] = getattr(import_module(module), function)
    except (ImportError, OSError, AttributeError) as error:
        return row | {"us": f"not measured: {str(error).splitlines()[0][:80]}"}

    def made(heads: int) -> torch.Tensor:
        return torch.randn(1, length, heads, shape.head_dim, device=device).bfloat16()

    q, k, v = made(shape.heads), made(shape.kv_heads), made(shape.kv_heads)
    try:
        with torch.inference_mode():
            timed = time_calls(lambda _: attend(q, k, v, causal=True), device, calls=4, repeat=repeat)
    except (RuntimeError, TypeError) as error:
        return row | {"us": f"not measured: {str(error).splitlines()[0][:80]}"}
    return row | {"us": timed.seconds * 1e6}

"""A trial of a library: one small step on the device that will serve.

Promises: a build without the GPU's code, pages, windows or this width of heads, or with wrong results, is found before
the weights are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from quire_kernels.flash.attention import FlashAttention
from quire_kernels.flash.library import Loaded
from quire_kernels.kernel_set import AttentionRows, AttentionShape, KVFormat
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.paged_kv import write_kv

_WINDOW = 5
_HEADS, _KV_HEADS = 4, 2
_LAYER, _LAYERS = 1, 2
_TOLERANCE = 0.02  # for values of about 1, in bfloat16


def why_it_fails(loaded: Loaded, *, device: torch.device, dtype: torch.dtype, kv: KVFormat) -> str | None:
    """None if its results are right; otherwise a clause that completes the library's name."""
    page = kv.block_size
    # Single rows and several, contexts within a page, on its border and past it.
    lengths, rows = (page + 3, page, 2, page + 7, 9), (1, 1, 1, 4, 9)
    ours, step = _step(lengths, rows, page, torch.device("cpu")), _step(lengths, rows, page, device)
    # The contents of unused slots must not matter: a failed request may have left NaN there.
    pool = REFERENCE.new_kv(
        1 + step.block_tables.numel(), _LAYERS, _KV_HEADS, page, kv.head_dim, dtype, ours.positions.device
    )
    pool.fill_(float("nan"))
    numbers = torch.Generator().manual_seed(0)

    def normal(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, kv.head_dim, generator=numbers).to(dtype)

    for length, table in zip(lengths, ours.block_tables, strict=True):
        at = torch.arange(length)
        slots = table[at // page].long() * page + at % page
        write_kv(pool, _LAYER, slots, normal(length, _KV_HEADS), normal(length, _KV_HEADS))
    q = normal(sum(rows), _HEADS)
    for window in (None, _WINDOW):
        shape = AttentionShape(
            num_heads=_HEADS, num_kv_heads=_KV_HEADS, head_dim=kv.head_dim, scale=kv.head_dim**-0.5, window=window
        )
        wanted = REFERENCE.attention(q.float(), shape, pool.float(), _LAYER, ours)
        try:
            found = (
                FlashAttention(loaded, REFERENCE.attention)
                .attention(q.to(device), shape, pool.to(device), _LAYER, step)
                .cpu()
            )
        except Exception as error:  # from the library, the driver, or the lack of memory
            return f"fails here: {(str(error).splitlines() or [type(error).__name__])[0]}"
        if not torch.allclose(found.float(), wanted, atol=_TOLERANCE, rtol=_TOLERANCE):
            return f"computes something else here{'' if window is None else ' where there is a window'}"
    return None


def _step(lengths: tuple[int, ...], rows: tuple[int, ...], page: int, device: torch.device) -> AttentionRows:
    """Sequences in blocks 1, 2, ..., as many for each as the longest has."""
    width = -(-max(lengths) // page)
    tables = 1 + torch.arange(len(lengths) * width, dtype=torch.int32).view(len(lengths), width)
    positions = [at for length, own in zip(lengths, rows, strict=True) for at in range(length - own, length)]
    return AttentionRows(
        positions=torch.tensor(positions, device=device),
        kv_slots=torch.zeros(len(positions), dtype=torch.int64, device=device),  # nothing is written
        query_starts=_int32([0, *accumulate(rows)], device),
        context_lens=_int32(lengths, device),
        block_tables=tables.to(device),
        query_lens=rows,
        kv_lens=lengths,
        max_query_len=max(rows),
        max_context_len=max(lengths),
    )


def _int32(values: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=device)

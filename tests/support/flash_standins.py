"""Functions that take exactly what the published attention libraries take, and compute it in plain torch on a CPU.

Promises: a keyword that a library does not have, a tensor that it would refuse and a page that it cannot read are
errors here too; what it would leave unwritten, or reads behind a sequence's end and does not mask, is NaN here.
Must not know: the adapters. The rules are of flash-attn 2.8.3 and of torch 2.13, read from their sources.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from support.flash_signatures import signature

PAGE = 256  # of flash-attn 2: a multiple
LEAST_TILE = 64  # of flash-attn 3: pages from here on may be read whole
NAN = float("nan")


def standin(entry: dict[str, Any], behave: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of the entry's signature, which passes all its arguments on by name."""
    taken = signature(entry)

    def function(*args: Any, **kwargs: Any) -> Tensor:
        bound = taken.bind(*args, **kwargs)
        bound.apply_defaults()
        used = inspect.signature(behave).parameters
        for name, value in bound.arguments.items():
            default = taken.parameters[name].default
            assert name in used or value is default or value == default, f"{name} is not modelled"
        return behave(**{name: value for name, value in bound.arguments.items() if name in used})

    function.__name__ = entry["function"]
    function.__signature__ = taken  # type: ignore[attr-defined]
    return function


def flash_attn_2_varlen(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor | None,
    num_splits: int = 1,
) -> Tensor:
    """[T, Hq, D]. Lengths of keys are the differences of `cu_seqlens_k`."""
    assert block_table is not None, "keys that are not in pages are not modelled"
    assert num_splits == 1, "rows of packed sequences over pages are mixed up when contexts are split"
    _flash_attn_2_tensors(q, k, v, block_table)
    _index(cu_seqlens_q, "cu_seqlens_q", len(block_table) + 1)
    _index(cu_seqlens_k, "cu_seqlens_k", len(block_table) + 1)
    lengths = cu_seqlens_k.diff().tolist()
    return _packed(
        q, k, v, cu_seqlens_q, lengths, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, block_table
    )


def flash_attn_2_with_kvcache(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    block_table: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """[B, S, Hq, D]. Without `cache_seqlens` every slot of the table's pages is a key."""
    assert block_table is not None, "keys that are not in pages are not modelled"
    _flash_attn_2_tensors(q, k_cache, v_cache, block_table)
    if q.dim() != 4 or len(q) != len(block_table):
        raise RuntimeError(f"q must have shape (batch_size, seqlen_q, num_heads, head_size), not {tuple(q.shape)}")
    lengths = _cache_lengths(cache_seqlens, k_cache, block_table)
    left, right = _window(window_size, causal, block_table.shape[1] * k_cache.shape[1])
    return torch.stack(
        [
            _sequence(rows, k_cache, v_cache, block_table[i], lengths[i], softmax_scale, left, right)
            for i, rows in enumerate(q)
        ]
    )


def flash_attn_3_with_kvcache(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """[T, Hq, D], of packed rows. Pages of any size, but the larger ones are read whole."""
    assert page_table is not None, "keys that are not in pages are not modelled"
    assert cu_seqlens_q is not None, "rows that are not packed are not modelled"
    _tensors(q, k_cache, v_cache, page_table)
    _index(cu_seqlens_q, "cu_seqlens_q", len(page_table) + 1)
    if max_seqlen_q is None:
        raise RuntimeError("max_seqlen_q must be provided if cu_seqlens_q is provided")
    lengths = _cache_lengths(cache_seqlens, k_cache, page_table)
    left, right = _window(window_size, causal, page_table.shape[1] * k_cache.shape[1])
    out = torch.full_like(q, NAN)
    starts = cu_seqlens_q.tolist()
    for i, (low, end) in enumerate(pairwise(starts)):
        high = min(end, low + max_seqlen_q)
        out[low:high] = _sequence(
            q[low:high],
            *(k_cache, v_cache, page_table[i], lengths[i], softmax_scale, left, right),
            whole_pages=k_cache.shape[1] >= LEAST_TILE,
        )
    return out


def fa3_fwd_varlen(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
) -> Tensor:
    """[T, Hq, D]. Keys lie one after the other, as many of each sequence as `cu_seqlens_k` says; bf16 alone."""
    if q.dtype != torch.bfloat16:
        raise RuntimeError("This flash attention build does not support FP16.")
    whole = k[None].contiguous(), v[None].contiguous()
    tables = torch.zeros(len(cu_seqlens_q) - 1, 1, dtype=torch.int32)
    _tensors(q, *whole, tables)
    _index(cu_seqlens_q, "cu_seqlens_q", len(cu_seqlens_q))
    _index(cu_seqlens_k, "cu_seqlens_k", len(cu_seqlens_q))
    starts, ends = cu_seqlens_k.tolist()[:-1], cu_seqlens_k.tolist()[1:]
    assert ends[-1] == len(k) == len(v), "keys that belong to no sequence"
    assert max_seqlen_k >= max(end - start for start, end in zip(starts, ends, strict=True)), "max_seqlen_k is less"
    out = torch.full_like(q, NAN)
    for i, (low, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        high = min(end, low + max_seqlen_q)
        own = [x[starts[i] : ends[i]].unsqueeze(0) for x in (k, v)]
        right = 0 if causal else -1
        out[low:high] = _sequence(q[low:high], *own, tables[i], ends[i] - starts[i], softmax_scale, -1, right)
    return out


def torch_varlen(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    num_splits: int | None,
) -> Tensor:
    """[T, Hq, D]. Lengths of keys are `seqused_k`; a window of (-1, 0) is causal."""
    assert block_table is not None, "keys that are not in pages are not modelled"
    assert seqused_k is not None, "blocks need the lengths"
    assert num_splits == 1, "rows of packed sequences over pages are mixed up when contexts are split"
    if not enable_gqa and query.shape[1] != key.shape[2]:
        raise ValueError("query and key have different numbers of heads")
    _flash_attn_2_tensors(query, key, value, block_table)
    _index(cu_seq_q, "cu_seq_q", len(block_table) + 1)
    if cu_seq_k is not None:
        _index(cu_seq_k, "cu_seq_k", len(block_table) + 1)
    _index(seqused_k, "seqused_k", len(block_table))
    causal = tuple(window_size) == (-1, 0)
    return _packed(
        query, key, value, cu_seq_q, seqused_k.tolist(), max_q, max_k, scale, causal, window_size, block_table
    )


def _packed(  # noqa: PLR0917
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    lengths: list[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    table: Tensor,
) -> Tensor:
    """flash-attn 2's packed sequences, with what it makes of one row at most."""
    assert max_seqlen_k >= max(lengths), "max_seqlen_k is less than a sequence's keys"
    if max_seqlen_q == 1:
        causal = False  # what follows from it: the right side of a window stays open
        swapped = q.shape[1] > k.shape[2] and max(window_size) < 0
        if swapped and len(q) != len(table):
            raise RuntimeError(f"shape '[{len(table)}, ...]' is invalid for input of size {q.numel()}")
    left, right = _window(window_size, causal, max_seqlen_k)
    out = torch.full_like(q, NAN)
    starts = cu_seqlens_q.tolist()
    for i, (low, end) in enumerate(pairwise(starts)):
        high = min(end, low + max_seqlen_q)  # no program computes the rows behind
        out[low:high] = _sequence(q[low:high], k, v, table[i], lengths[i], scale, left, right)
    return out


def _sequence(  # noqa: PLR0917
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    length: int,
    scale: float | None,
    left: int,
    right: int,
    *,
    whole_pages: bool = False,
) -> Tensor:
    """[t, Hq, D] of one sequence: rows are its last, a side of the window of -1 is open."""
    page = k.shape[1]
    blocks = table[: -(-length // page)].long()
    keys, values = (x[blocks].flatten(0, 1).float() for x in (k, v))  # [slots, Hkv, D]
    group = q.shape[1] // k.shape[2]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    at = torch.arange(length - len(q), length).unsqueeze(1)
    slots = torch.arange(len(keys))
    seen = (slots < length).expand(len(q), -1)
    if left >= 0:
        seen = seen & (slots >= at - left)
    if right >= 0:
        seen = seen & (slots <= at + right)
    if not whole_pages:
        values = values[:length]
    scores = torch.einsum("thd,shd->hts", q.float(), keys) * (scale or q.shape[-1] ** -0.5)
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)[..., : len(values)]
    return torch.einsum("hts,shd->thd", weights, values).to(q.dtype)


def _window(window_size: tuple[int, int], causal: bool, most_keys: int) -> tuple[int, int]:
    left, right = window_size
    if causal:
        right = 0
    return (-1 if left >= most_keys else left), (-1 if right >= most_keys else right)


def _cache_lengths(cache_seqlens: Tensor | None, k_cache: Tensor, table: Tensor) -> list[int]:
    if cache_seqlens is None:
        return [table.shape[1] * k_cache.shape[1]] * len(table)
    _index(cache_seqlens, "seqlens_k", len(table))
    lengths: list[int] = cache_seqlens.tolist()
    return lengths


def _flash_attn_2_tensors(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> None:
    _tensors(q, k, v, table)
    if k.shape[1] % PAGE:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")


def _tensors(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> None:
    if q.dtype not in (torch.float16, torch.bfloat16) or {k.dtype, v.dtype} != {q.dtype}:
        raise RuntimeError("only fp16 and bf16, and the same for query, key and value")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise RuntimeError("tensors must have a contiguous last dimension")
    if any(stride % 8 for x in (q, k, v) for stride in x.stride()[:-1]):
        raise RuntimeError("rows of 16 bytes are loaded at a time")
    if k.shape != v.shape or k.dim() != 4 or k.shape[3] != q.shape[-1]:
        raise RuntimeError("K and V must have shape (num_blocks, page_block_size, num_heads_k, head_size)")
    if q.shape[-1] % 8 or q.shape[-1] > 256 or q.shape[-2] % k.shape[2]:
        raise RuntimeError("head_size is a multiple of 8 up to 256, heads of queries one of heads of keys")
    if table.dtype != torch.int32 or table.dim() != 2 or table.stride(-1) != 1 or not len(table):
        raise RuntimeError("block_table must have dtype torch.int32 and a contiguous last dimension")


def _index(tensor: Tensor, name: str, length: int) -> None:
    if tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.shape != (length,):
        raise RuntimeError(f"{name} must be a contiguous int32 tensor of shape ({length},)")

"""Copies of whole blocks of the pool, many in one launch.

Promises: a bitwise copy for any content of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORD = 8  # bytes per word
_CHUNK = 2048  # words per program: 16 for each of its threads


@triton.jit(do_not_specialize_on_alignment=("pairs",))
def copy_block_words(
    pool,  # [blocks, WORDS], 8 bytes a word
    pairs,  # [n, 2] int64: source, target; no target is a source
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """CHUNK words of one pair's block. Programs: (chunks, pairs)."""
    pair = tl.program_id(1)
    source, target = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    words = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = words < WORDS
    found = tl.load(pool + source * WORDS + words, mask=inside)
    tl.store(pool + target * WORDS + words, found, mask=inside)


def copy_blocks(kv: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks, (source, target) each: all sources are read before any target is written."""
    if not pairs:
        return
    indices = torch.tensor(pairs, dtype=torch.int64)  # [n, 2]
    if kv.is_cuda:
        # A copy from pinned memory is asynchronous; torch keeps the memory until the copy has read it.
        indices = indices.pin_memory().to(kv.device, non_blocking=True)
    num_bytes = kv[0].numel() * kv.itemsize
    chained = {source for source, _ in pairs} & {target for _, target in pairs}
    whole = not num_bytes % _WORD
    # As integers: a copy of floats may change NaNs, as torch's deterministic mode does on a GPU.
    pool = kv.view(-1).view(torch.int64 if whole else torch.uint8)
    if chained or not whole:  # programs run in any order
        blocks = pool.view(len(kv), -1)
        blocks[indices[:, 1]] = blocks[indices[:, 0]]
        return
    words = num_bytes // _WORD
    copy_block_words[triton.cdiv(words, _CHUNK), len(pairs)](pool, indices, WORDS=words, CHUNK=_CHUNK, num_warps=4)

"""The heads and blocks that a pool of the C++ kernels supports.

Promises: mirrors the constants of attention.h; light to import, since it is used before any kernel is compiled. Must
not know: tensors, models.
"""

from __future__ import annotations

UNIT = 16  # positions; attention.h says kUnit
MAX_HEAD_DIM = 512


def unsupported(*, head_dim: int, block_size: int) -> str | None:
    """Why the kernels do not support such heads and blocks, as in `Provider.why_not`; None if they do."""
    if head_dim % UNIT or not UNIT <= head_dim <= MAX_HEAD_DIM:
        return f"take heads whose width is a multiple of {UNIT} up to {MAX_HEAD_DIM}, not head_dim {head_dim}"
    if block_size % UNIT or block_size < UNIT:
        return f"take blocks of a multiple of {UNIT} tokens, not block_size {block_size} (set block_size to {UNIT})"
    return None

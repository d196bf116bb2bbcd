"""How many rows and keys a program of the attention kernels takes at a time.

Promises: what is chosen depends on the layer and the mode alone, never on a step, so a row's sums never do; no kernel
needs more registers than a thread has, on any architecture from 8.0 on. Must not know: how attention is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_kernels.kernel_set import AttentionShape
from quire_kernels.triton.pool import PoolSizes


@dataclass(frozen=True, slots=True)
class Tiling:
    """`rows` pairs of a query row and a head, `keys` positions, for `warps` warps."""

    rows: int
    keys: int
    warps: int

    def constants(self, shape: AttentionShape, sizes: PoolSizes) -> dict[str, int | bool]:
        """What a kernel that walks over keys is compiled for and launched with."""
        return {
            "GROUP": shape.num_heads // shape.num_kv_heads,
            "ROWS": self.rows,
            "TILE": self.keys,
            "WINDOW": shape.window or 0,
            "BLOCK_D": block_d(shape),
            **sizes.constants(),
            "num_warps": self.warps,
            "num_stages": 3,  # tiles of keys and values on their way at once
        }


def block_d(shape: AttentionShape) -> int:
    """head_dim as a product takes it."""
    return max(16, _power_of_two(shape.head_dim))


def prefill_tiling(shape: AttentionShape, sizes: PoolSizes, *, deterministic: bool) -> Tiling:
    """64 rows make warp group products on Hopper; two states (deterministic) or decoded keys (fp8) leave less room."""
    if deterministic:
        return Tiling(32 if shape.head_dim > 128 else 64, 32 if shape.head_dim > 128 or sizes.fp8 else 64, 8)
    if shape.head_dim > 128:
        return Tiling(64, 32, 8)
    return Tiling(64 if sizes.fp8 else 128, 64, 8)


def decode_tiling(shape: AttentionShape, sizes: PoolSizes, *, deterministic: bool) -> Tiling:
    """The rows are those of one key head, and the least that tensor cores take; deterministic: just as prefill's."""
    heads = _power_of_two(shape.num_heads // shape.num_kv_heads)
    if deterministic:
        tiling = prefill_tiling(shape, sizes, deterministic=True)
        return Tiling(max(heads, tiling.rows), tiling.keys, tiling.warps)
    return Tiling(max(heads, 16), 32 if shape.head_dim > 128 else 64, 4)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()

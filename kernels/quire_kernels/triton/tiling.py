"""Tile sizes of the attention kernels.

Promises: the choice depends on the layer and the mode only, never on a step, and so does the order of a row's sums; no
kernel spills registers in a loop on any architecture from 8.0 on, as the audit of their machine code shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_kernels.kernel_set import AttentionShape
from quire_kernels.triton.pool import PoolSizes


@dataclass(frozen=True, slots=True)
class Tiling:
    """`rows`: pairs of a query row and a head; `keys`: positions; `stages`: tiles of keys in the pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int = 3

    def constants(self, shape: AttentionShape, sizes: PoolSizes) -> dict[str, int | float | bool]:
        """Compile-time constants and launch options of a kernel that calls `walk_keys`."""
        return {
            "GROUP": shape.num_heads // shape.num_kv_heads,
            "ROWS": self.rows,
            "TILE": self.keys,
            "WINDOW": shape.window or 0,
            "SOFTCAP": shape.softcap or 0.0,
            "SINKS": shape.sinks is not None,
            "BLOCK_D": block_d(shape),
            **sizes.constants(),
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# Wider heads, of up to 512 as in Gemma 4's layers without a window, leave two stages of few keys in shared memory.
_WIDE = 256


def block_d(shape: AttentionShape) -> int:
    """head_dim padded to a size for `tl.dot`."""
    return max(16, _power_of_two(shape.head_dim))


def prefill_tiling(  # noqa: PLR0911 - a table of tilings
    shape: AttentionShape, sizes: PoolSizes, *, warp_groups: bool, deterministic: bool
) -> Tiling:
    """The largest tile that fits into registers: fp8 needs registers to decode, deterministic mode for a second state.

    With warp groups (Hopper and its data centre successors) products read 64 rows from shared memory; elsewhere their
    operands are in registers too. For wide heads, several small tiles per multiprocessor were 1.06 to 1.15 times as
    fast on an H100 as one large tile.
    """
    narrow, large = shape.head_dim <= 64, shape.head_dim > 128
    if shape.head_dim > _WIDE:  # a row's sums alone are 2 KiB of registers, and so are its queries there
        if deterministic:
            return Tiling(16, 32, 8, stages=2 if warp_groups or sizes.fp8 else 1)
        return Tiling(32 if sizes.fp8 else 64, 32, 8, stages=2) if warp_groups else Tiling(32, 16, 8)
    if warp_groups:
        if deterministic:
            return Tiling(32 if large else 64, 32, 4 if narrow else 8)
        if large or sizes.fp8:
            return Tiling(64, 32 if large else 64, 8)
        return Tiling(128, 64, 8) if narrow else Tiling(64, 64, 4, stages=2)
    keys = 16 if large else 32
    if deterministic:
        return Tiling(32, keys, 8)
    return Tiling(64 if narrow or large or sizes.fp8 else 128, keys, 8)


def decode_tiling(shape: AttentionShape, sizes: PoolSizes, *, warp_groups: bool, deterministic: bool) -> Tiling:
    """The heads of one key head, padded to the least rows of tensor cores; deterministic: the tiles of prefill.

    Few large tiles of keys: a program waits for each of them, and on an H100 half as many were up to 1.2 times as fast.
    """
    heads = _power_of_two(shape.num_heads // shape.num_kv_heads)
    if deterministic:
        tiling = prefill_tiling(shape, sizes, warp_groups=warp_groups, deterministic=True)
        return Tiling(max(heads, tiling.rows), tiling.keys, tiling.warps, tiling.stages)
    if shape.head_dim > _WIDE:
        return Tiling(max(heads, 16), 32 if warp_groups else 16, 8, stages=2)
    if not warp_groups or shape.head_dim > 128:
        return Tiling(max(heads, 16), 32, 4)
    if heads > 16 or sizes.fp8:
        return Tiling(max(heads, 16), 64, 4)
    return Tiling(16, 128, 4, stages=2)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()

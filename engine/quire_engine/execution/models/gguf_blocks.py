"""The blocks in which GGUF files store matrices, as integers with scales and offsets, and as numbers.

Promises: each number has the bits that the format's own library gives it in float32; the integers are apart from their
scales, so that they can be packed as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quire_engine.gguf import KINDS
from quire_kernels.stored import UNIT_COLUMNS, StoredKind, StoredMatrix

_BLOCK_BYTES = {kind.name: kind.num_bytes for kind in KINDS.values()}
_AT_ONCE = 1 << 20  # values that one thread decodes

_BF16 = torch.bfloat16
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values, to be whole numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Blocks as groups of g values with a scale each: scale * steps * table[code] - low * low_steps.

    `scale` and `low` are of 16 bits (or powers of 2) and the steps integers of 8, so that their products are exact in
    float32. Without a table the codes are the values.
    """

    codes: Tensor  # [B, G, g] uint8 or int8
    scale: Tensor  # [B, 1] float32
    table: tuple[int, ...] | None = None  # of 16
    steps: Tensor | None = None  # [B, G] float32
    low: Tensor | None = None  # [B, 1] float32
    low_steps: Tensor | None = None  # [B, G] float32
    scale_type: torch.dtype = torch.float16  # of 16 bits, which holds scale (and scale * steps where a block is short)

    def values(self) -> Tensor:
        """[B, G * g] float32."""
        if self.table is None:
            wide = self.codes.float()
        else:
            wide = torch.tensor(self.table, dtype=torch.float32)[self.codes.long()]
        wide *= _product(self.scale, self.steps).unsqueeze(-1)
        if self.low is not None:
            wide -= _product(self.low, self.low_steps).unsqueeze(-1)
        return wide.flatten(1)


def _product(one: Tensor, other: Tensor | None) -> Tensor:
    return one if other is None else one * other


def groups(kind: str, blocks: Tensor) -> Groups:
    """[B, bytes of a block] uint8, of a type by its name in the format."""
    return _LAYOUTS[kind](blocks)


class StoredType(NamedTuple):
    """How the matrices of a type are stored, in neutral form."""

    kind: StoredKind
    group_size: int
    beside: float  # bits of a group beside its codes


@cache
def stored_type(kind: str) -> StoredType:
    """Return the stored form of a type, by its name in the format."""
    found = groups(kind, torch.zeros(1, _BLOCK_BYTES[kind], dtype=torch.uint8))
    size, parts = found.codes.shape[2], _stored_parts(found)
    beside = sum(8 * parts[name].itemsize if name in parts else 0 for name in ("scales", "offsets"))
    units = sum(name in parts for name in ("scale_units", "offset_units"))
    return StoredType(_kind(kind, found), size, beside + 16 * units * size / UNIT_COLUMNS)


def _kind(kind: str, found: Groups) -> StoredKind:
    if found.table is not None:
        return "nibbles"
    return "bytes" if kind == "Q8_0" else "six_bits"


def stored_matrix(kind: str, rows: Tensor, threads: int) -> StoredMatrix:
    """[N, bytes of a row] uint8 -> [N, K] as it is stored. ValueError: a scale is not a finite number."""
    form, first = stored_type(kind), _groups_of(kind, rows[:1])
    parts = {name: value.new_empty(len(rows), value.numel()) for name, value in _stored_parts(first).items()}

    def convert(piece: slice) -> None:
        for name, value in _stored_parts(_groups_of(kind, rows[piece])).items():
            parts[name][piece] = value.view(-1, parts[name].shape[1])

    _by_pieces(convert, parts["codes"], threads)
    for name, value in parts.items():
        if name != "codes" and not bool(torch.isfinite(value).all()):
            raise ValueError("has scales that are not finite numbers")
    table = () if first.table is None else tuple(map(float, first.table))
    return StoredMatrix(kind=form.kind, group_size=form.group_size, table=table, **parts)


def _stored_parts(found: Groups) -> dict[str, Tensor]:
    """The tensors of a `StoredMatrix`, a row for each block; scales in units where a block is what has one."""
    parts = {"codes": found.codes.view(torch.uint8).flatten(1)}
    has_units = parts["codes"].shape[1] == UNIT_COLUMNS
    low = None if found.low is None else -found.low
    for name, unit, steps in (("scale", found.scale, found.steps), ("offset", low, found.low_steps)):
        if unit is None:
            continue
        if steps is not None and has_units:
            parts |= {f"{name}s": steps.to(torch.int8), f"{name}_units": unit.half()}
        else:
            parts[f"{name}s"] = _product(unit, steps).to(found.scale_type)
    return parts


def dequantise(kind: str, rows: Tensor, threads: int) -> Tensor:
    """[N, bytes of a row] uint8 -> [N, K] float32; what is computed between takes the memory of a few pieces."""
    wide = torch.empty(len(rows), _groups_of(kind, rows[:1]).codes.numel())

    def decode(piece: slice) -> None:
        wide[piece] = _groups_of(kind, rows[piece]).values().view(-1, wide.shape[1])

    _by_pieces(decode, wide, threads)
    return wide


def _groups_of(kind: str, rows: Tensor) -> Groups:
    return groups(kind, rows.reshape(-1, _BLOCK_BYTES[kind]))


def _by_pieces(convert: Callable[[slice], None], made: Tensor, threads: int) -> None:
    """Call it for all rows of what is made, a few at a time."""
    step = max(1, _AT_ONCE // max(1, made.shape[1]))

    def one(start: int) -> None:
        with torch.inference_mode(made.is_inference()):  # which is a thread's own
            convert(slice(start, min(start + step, len(made))))

    with ThreadPoolExecutor(threads, "weights") as pool:
        for _ in pool.map(one, range(0, len(made), step)):
            pass


def _half(blocks: Tensor, at: int) -> Tensor:
    """[B, 1] float32, stored in 16 bits from a byte on."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: all low halves, then all high ones."""
    return torch.cat([data & 15, data >> 4], dim=-1)


def _fields(data: Tensor, bits: int) -> Tensor:
    """[B, P, n] bytes -> [B, P * 8 / bits, n]: the lowest bits of all, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    return (data.unsqueeze(2) >> shifts & (1 << bits) - 1).flatten(1, 2)


def _bits(data: Tensor) -> Tensor:
    """[B, 4] bytes -> [B, 1, 32], the lowest bit first."""
    return (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1).unsqueeze(1)


def _q4_0(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 2:]).unsqueeze(1)
    return Groups(codes=codes, table=tuple(range(-8, 8)), scale=_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 4:]).unsqueeze(1)
    return Groups(codes=codes, table=tuple(range(16)), scale=_half(blocks, 0), low=-_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 6:]).unsqueeze(1) | _bits(blocks[:, 2:6]) << 4
    return Groups(codes=codes.view(torch.int8) - 16, scale=_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Groups:
    codes = _nibbles(blocks[:, 8:]).unsqueeze(1) | _bits(blocks[:, 4:8]) << 4
    return Groups(codes=codes, scale=_half(blocks, 0), low=-_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Groups:
    codes = blocks[:, 2:].contiguous().view(torch.int8).unsqueeze(1)
    return Groups(codes=codes, scale=_half(blocks, 0))


def _q2_k(blocks: Tensor) -> Groups:
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return Groups(
        codes=codes,
        table=tuple(range(16)),
        scale=_half(blocks, 80),
        steps=(blocks[:, :16] & 15).float(),
        low=_half(blocks, 82),
        low_steps=(blocks[:, :16] >> 4).float(),
    )


def _q3_k(blocks: Tensor) -> Groups:
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    steps = _fields(packed[:, :8].unsqueeze(1), 4).flatten(1) | _fields(packed[:, 8:].unsqueeze(1), 2).flatten(1) << 4
    # The bit that is stored apart means that nothing is taken away.
    codes = _fields(low.reshape(-1, 2, 32), 2) | _fields(high.unsqueeze(1), 1) << 2
    return Groups(
        codes=codes.reshape(-1, 16, 16), table=tuple(range(-4, 12)), scale=_half(blocks, 108), steps=steps.float() - 32
    )


def _steps_of_k(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 12] bytes -> twice [B, 8]: eight steps of scales and eight of offsets, of six bits each."""
    first, second, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    steps = torch.cat([first & 63, high & 15 | first >> 6 << 4], dim=1)
    low_steps = torch.cat([second & 63, high >> 4 | second >> 6 << 4], dim=1)
    return steps.float(), low_steps.float()


def _q4_k(blocks: Tensor) -> Groups:
    steps, low_steps = _steps_of_k(blocks[:, 4:16])
    return Groups(
        codes=_fields(blocks[:, 16:].reshape(-1, 4, 32), 4),
        table=tuple(range(16)),
        scale=_half(blocks, 0),
        steps=steps,
        low=_half(blocks, 2),
        low_steps=low_steps,
    )


def _q5_k(blocks: Tensor) -> Groups:
    steps, low_steps = _steps_of_k(blocks[:, 4:16])
    high = _fields(blocks[:, 16:48].unsqueeze(1), 1)
    return Groups(
        codes=_fields(blocks[:, 48:].reshape(-1, 4, 32), 4) | high << 4,
        scale=_half(blocks, 0),
        steps=steps,
        low=_half(blocks, 2),
        low_steps=low_steps,
    )


def _q6_k(blocks: Tensor) -> Groups:
    low = _fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 8, 32)
    high = _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2)
    codes = (low | high << 4).view(torch.int8) - 32
    steps = blocks[:, 192:208].contiguous().view(torch.int8)
    return Groups(codes=codes.reshape(-1, 16, 16), scale=_half(blocks, 208), steps=steps.float())


def _iq4_nl(blocks: Tensor) -> Groups:
    return Groups(codes=_nibbles(blocks[:, 2:]).unsqueeze(1), table=_IQ4, scale=_half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Groups:
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=-1).flatten(1)
    high = (blocks[:, 2:4].unsqueeze(-1) >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(1)
    return Groups(
        codes=_nibbles(blocks[:, 8:].reshape(-1, 8, 16)),
        table=_IQ4,
        scale=_half(blocks, 0),
        steps=(low | high << 4).float() - 32,
    )


def _mxfp4(blocks: Tensor) -> Groups:
    """OCP Microscaling Formats 1.0: a power of 2 for 32 values of e2m1."""
    exponents = blocks[:, :1].int()
    # Half of the power, since the table has twice the values; the smallest two are below the normal numbers.
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1).clamp(min=0) << 23)
    codes = _nibbles(blocks[:, 1:]).unsqueeze(1)
    return Groups(codes=codes, table=_E2M1, scale=bits.view(torch.float32), scale_type=_BF16)


def _nvfp4(blocks: Tensor) -> Groups:
    """A number of e4m3 without a sign for 16 values of e2m1."""
    stored = blocks[:, :4]
    exponents, fraction = (stored >> 3 & 15).float(), (stored & 7).float()
    steps = torch.where(exponents == 0, fraction * 2**-9, (1 + fraction / 8) * torch.exp2(exponents - 7)) * 0.5
    steps = torch.where((stored == 0) | (stored == 0x7F), 0.0, steps)
    codes = _nibbles(blocks[:, 4:].reshape(-1, 4, 8))
    ones = torch.ones(len(blocks), 1)
    return Groups(codes=codes, table=_E2M1, scale=ones, steps=steps, scale_type=_BF16)


_LAYOUTS: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}

"""The blocks in which GGUF files store matrices, as integers with scales and offsets, and as numbers.

Promises: each number has the bits that the format's own library gives it in float32; the integers are apart from their
scales, so that they can be packed as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.gguf import KINDS

_BLOCK_BYTES = {kind.name: kind.num_bytes for kind in KINDS.values()}
_AT_ONCE = 1 << 20  # values that one thread decodes

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


def dequantise(kind: str, rows: Tensor, threads: int) -> Tensor:
    """[N, bytes of a row] uint8 -> [N, K] float32; what is computed between takes the memory of a few pieces."""
    size = _BLOCK_BYTES[kind]
    first = groups(kind, rows[:1].reshape(-1, size)).values()
    wide = torch.empty(len(rows), first.numel())
    step = max(1, _AT_ONCE // max(1, wide.shape[1]))

    def decode(start: int) -> None:
        with torch.inference_mode(wide.is_inference()):  # which is a thread's own
            piece = rows[start : start + step]
            wide[start : start + step] = groups(kind, piece.reshape(-1, size)).values().view(len(piece), -1)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(decode, range(0, len(rows), step)):
            pass
    return wide


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
    return Groups(codes=_nibbles(blocks[:, 1:]).unsqueeze(1), table=_E2M1, scale=bits.view(torch.float32))


def _nvfp4(blocks: Tensor) -> Groups:
    """A number of e4m3 without a sign for 16 values of e2m1."""
    stored = blocks[:, :4]
    exponents, fraction = (stored >> 3 & 15).float(), (stored & 7).float()
    steps = torch.where(exponents == 0, fraction * 2**-9, (1 + fraction / 8) * torch.exp2(exponents - 7)) * 0.5
    steps = torch.where((stored == 0) | (stored == 0x7F), 0.0, steps)
    codes = _nibbles(blocks[:, 4:].reshape(-1, 4, 8))
    return Groups(codes=codes, table=_E2M1, scale=torch.ones(len(blocks), 1), steps=steps)


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

"""The conversion to eight bits and back, against torch's, exhaustively where that is possible."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire_kernels.triton.e4m3 import decode_e4m3, encode_e4m3
from support.triton_attention import DEVICE

CHUNK = 1024


@triton.jit
def _encode(x, out, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    tl.store(out + at, encode_e4m3(tl.load(x + at)))


@triton.jit
def _decode(codes, out, CHUNK: tl.constexpr):
    at = tl.arange(0, CHUNK)
    tl.store(out + at, decode_e4m3(tl.load(codes + at)).to(tl.float32) * 256.0)


def test_every_code_is_decoded_as_torch_does():
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, device=DEVICE)
    _decode[(1,)](codes, out, CHUNK=256)
    wanted = codes.view(torch.float8_e4m3fn).float()
    numbers = wanted.isfinite()  # all but NaN's two codes
    assert torch.equal(out[numbers], wanted[numbers])
    assert int(numbers.sum()) == 254


def test_numbers_are_encoded_as_torch_does():
    """Every code, what lies between two codes, their neighbours, all scales of random numbers, both signs."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (codes[1:] + codes[:-1]) / 2
    edges = [x for number in (codes, between) for x in (number, number * (1 + 2**-23), number * (1 - 2**-23))]
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(2000, generator=generator) * torch.exp2(torch.randint(-20, 7, (2000,), generator=generator))
    x = torch.cat([*edges, spread]).clamp(-448, 448)
    x = torch.cat([x, -x])
    x = torch.cat([x, x.new_zeros(-len(x) % CHUNK)]).to(DEVICE)
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    _encode[(len(x) // CHUNK,)](x, out, CHUNK=CHUNK)
    assert torch.equal(out, x.to(torch.float8_e4m3fn).view(torch.uint8))

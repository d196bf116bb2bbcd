"""Tables of rotary position embedding: the cosines and sines of every position's angles, for every RoPE type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire_engine.execution.models.config import RopeConfig


def rope_table(rope: RopeConfig | None, head_dim: int, num_positions: int, *, rotary_dim: int | None = None) -> Tensor:
    """[num_positions, head_dim] float32: the cosines of a position's head_dim / 2 angles, then their sines.

    Of `rotary_dim` values that are rotated, all by default; the others, and all of a layer without rope, have angles of
    zero.

    The row of a position depends on that position alone, for every RoPE type. The types are as in transformers'
    `modeling_rope_utils`: default (Su et al. 2021, arXiv:2104.09864), linear (position interpolation), llama3, yarn
    (Peng et al. 2023, arXiv:2309.00071) and dynamic NTK. The last one stretches its base with the length of the
    sequence; taken literally, a key's rotation would depend on how the prompt was cut into slices and on what shares
    the batch. Here the length that counts for position p is p + 1, which is what a model that decodes token by token
    with a KV cache sees, and which equals the reference up to the original length.
    """
    turned = head_dim if rotary_dim is None else rotary_dim
    if rope is None:
        turned, cosines, sines = 0, torch.empty(num_positions, 0), torch.empty(num_positions, 0)
    else:
        positions = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1)
        angles = positions * _frequencies(rope, turned, positions)
        amplitude = _amplitude(rope)
        cosines, sines = angles.cos() * amplitude, angles.sin() * amplitude
    kept = torch.ones(num_positions, (head_dim - turned) // 2)
    return torch.cat([cosines, kept, sines, 0.0 * kept], dim=1)


def _frequencies(rope: RopeConfig, head_dim: int, positions: Tensor) -> Tensor:
    """Radians per position: [D / 2], or [P, D / 2] where they depend on the position [P, 1]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type in {"linear", "proportional"}:
        plain[int(rope.share * head_dim // 2) :] = 0.0
        return plain / rope.factor
    if rope.rope_type == "dynamic":
        length = (positions + 1).clamp(min=rope.original_max_positions)
        stretch = rope.factor * length / rope.original_max_positions - (rope.factor - 1)
        base = rope.theta * stretch ** (head_dim / (head_dim - 2))
        return 1.0 / (base**exponents)
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, plain)
    if rope.rope_type == "longrope":
        # Ding et al. 2024, arXiv:2402.13753. One table for all served lengths: a row does not depend on others.
        factors = rope.long_factors if len(positions) > rope.original_max_positions else rope.short_factors
        return plain / torch.tensor(factors, dtype=torch.float32)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    turns = rope.original_max_positions * plain / (2 * math.pi)  # full rotations over the original length
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor


def _yarn(rope: RopeConfig, head_dim: int, plain: Tensor) -> Tensor:
    """Dimensions that turn over beta_fast times in the original length are kept, under beta_slow times divided."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    divide = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return plain / rope.factor * divide + plain * (1.0 - divide)


def _amplitude(rope: RopeConfig) -> float:
    """The attention factor of YaRN and LongRoPE, which multiplies cosines and sines; 1 for the other types."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type != "yarn":
        return 1.0

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)

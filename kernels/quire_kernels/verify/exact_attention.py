"""Error bounds of attention for given queries, keys and values.

Owns the derivation.

The attention weights of a row are rounded to the model's dtype one by one before they are multiplied with the values.
If keys are stored inexactly, the scores are inexact too: each number of a key is rounded once by the norm, once by the
rotation and once by the write. The rotation changes both numbers of a pair together, all other roundings are
independent. Scores and sums are float32. A cap makes errors of scores smaller, and adds one of its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire_kernels.kernel_set import AttentionShape
from quire_kernels.verify import tolerance

_CAP_ERROR = 1e-6  # of a capped score, as a share of the cap: what is left of it changes a weight by that much
_ROWS = 256  # rows at a time: memory is heads x rows x positions


def attention_bound(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, truth: Tensor, shape: AttentionShape, dtype: torch.dtype, *, key_roundings: int
) -> Tensor:
    """The bounds for every row of one sequence: [T, Hq * D].

    q [T, Hq, D], k and v [T, Hkv, D], truth [T, Hq * D]. `key_roundings`: roundings of each number of a key; 0: keys
    are exact.
    """
    group = shape.num_heads // shape.num_kv_heads
    queries = q.float().transpose(0, 1)  # [Hq, T, D]
    keys, values = (x.float().transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
    results = truth.float().view(len(q), shape.num_heads, -1).transpose(0, 1)
    parts = [
        _bound(
            queries[:, start:end], keys[:, :end], values[:, :end], results[:, start:end], shape, dtype, key_roundings
        )
        for start, end in ((start, min(start + _ROWS, len(q))) for start in range(0, len(q), _ROWS))
    ]
    return torch.cat(parts, dim=1).transpose(0, 1).flatten(1)


def _bound(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, truth: Tensor, shape: AttentionShape, dtype: torch.dtype, key_roundings: int
) -> Tensor:
    """Bounds [Hq, R, D] for the last R of P positions: q and truth [Hq, R, D], k and v [Hq, P, D]."""
    (num_rows, width), num_positions = q.shape[1:], k.shape[1]
    distance = torch.arange(num_positions - num_rows, num_positions)[:, None] - torch.arange(num_positions)
    visible = (distance >= 0) & (distance < (shape.window or num_positions))
    scores = q @ k.transpose(1, 2) * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    if shape.sinks is not None:
        scores = torch.cat([scores, shape.sinks.view(-1, 1, 1).expand(-1, num_rows, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_positions]
    u = tolerance.precision(dtype)
    magnitudes = weights @ v.abs()
    bound = tolerance.independent((2 * u) ** 2 * (weights.square() @ v.square()), u * magnitudes)
    if key_roundings:
        # Rotation keeps a pair's length, and the bound is the same for an error in either number of the pair.
        lengths = (k.square() + k.roll(width // 2, dims=-1).square()) * 2
        per_score = (2 * key_roundings * u * shape.scale) ** 2 * (q.square() @ lengths.transpose(1, 2))
        # A change d of a score multiplies a weight by exp(d), and d is bounded as well.
        per_score = per_score * torch.exp(2 * tolerance.independent(per_score))
        moved = weights.square() * per_score
        spread = moved @ v.square() - 2 * truth * (moved @ v) + truth.square() * moved.sum(-1, keepdim=True)
        bound = bound + tolerance.independent(spread)
    largest = float((q.abs() @ k.abs().transpose(1, 2)).max()) * shape.scale
    num_terms = num_positions + 8 + int((width + 8) * max(1.0, largest))
    if shape.softcap is not None:
        bound = bound + 2 * _CAP_ERROR * shape.softcap * magnitudes
    return bound + tolerance.float32_sum(num_terms, magnitudes) + tolerance.rounded(truth, dtype)

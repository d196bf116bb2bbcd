"""Compares two models' logits: divergence, agreement, perplexity.

Promises: divergences are computed in float64, a few rows at a time; perplexities leave out each prompt's first token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

_ROWS_AT_ONCE = 64  # rows converted to float64 together

Prompts = Sequence[Sequence[int]]


class Comparison:
    """Compares a model's logits with a reference's, prompt by prompt."""

    def __init__(self, prompts: Prompts, reference: Sequence[Tensor]) -> None:
        self._waiting = zip(prompts, reference, strict=True)
        self._kl: list[Tensor] = []
        self._same: list[Tensor] = []
        self._losses: tuple[list[Tensor], list[Tensor]] = ([], [])

    def add(self, logits: Tensor) -> None:
        """Compare the next prompt's logits [T, V]."""
        prompt, reference = next(self._waiting)
        self._kl.append(kl(reference, logits))
        self._same.append(reference.argmax(dim=-1) == logits.argmax(dim=-1))
        for rows, losses in zip((reference, logits), self._losses, strict=True):
            losses.append(cross_entropy(rows[:-1], torch.tensor(prompt[1:]), reduction="none"))

    @property
    def num_positions(self) -> int:
        return sum(len(rows) for rows in self._kl)

    @property
    def mean_kl(self) -> float:
        return torch.cat(self._kl).mean().item()

    @property
    def max_kl(self) -> float:
        return torch.cat(self._kl).max().item()

    @property
    def greedy_agreement(self) -> float:
        """The share of positions where both models have the same most likely token."""
        return torch.cat(self._same).double().mean().item()

    @property
    def reference_perplexity(self) -> float:
        """exp of the mean negative log likelihood of each prompt's tokens but the first."""
        return math.exp(torch.cat(self._losses[0]).double().mean().item())

    @property
    def perplexity(self) -> float:
        return math.exp(torch.cat(self._losses[1]).double().mean().item())


def kl(reference: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(reference) || softmax(other)) of each row of [T, V] logits, nats: [T] float64."""
    parts = []
    for start in range(0, len(reference), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        log_p, log_q = (logits[rows].double().log_softmax(dim=-1) for logits in (reference, other))
        parts.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
    return torch.cat(parts).clamp(min=0.0)  # rounding may leave equal rows slightly below 0


def equal_share(reference: Sequence[int], other: Sequence[int]) -> float:
    """The length of the common prefix as a share of `reference`, 0 to 1."""
    differing = (at for at, pair in enumerate(zip(reference, other, strict=False)) if pair[0] != pair[1])
    return next(differing, min(len(reference), len(other))) / len(reference)

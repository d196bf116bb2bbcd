"""What tests of the choice of tokens share: rows of parameters for the kernel and for the CPU's sampler at once.

Promises: both are told the same. Must not know: how either chooses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire_engine.contract.batch import SampledToken
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution.logit_rules import SampleRow
from quire_kernels.kernel_set import ChoiceRows
from support.guarded import DEVICE
from support.sampling import sample


@dataclass(frozen=True, slots=True)
class Wish:
    """One token to choose."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 1


def random_wishes(count: int, vocab_size: int, seed: int) -> list[Wish]:
    """Every mixture of limits, greedy rows among them."""
    source = random.Random(seed)
    return [
        Wish(
            temperature=source.choice([0.0, 0.05, 0.6, 1.0, 2.5]),
            top_k=source.choice([0, 0, 1, 5, 40, vocab_size - 1, vocab_size, 10**6]),
            top_p=source.choice([1.0, 1.0, 0.95, 0.5, 1e-9]),
            min_p=source.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
            seed=source.getrandbits(64),
            choice=source.randrange(5),
            position=source.randrange(1, 5000),
        )
        for _ in range(count)
    ]


def choice_rows(wishes: Sequence[Wish], logits_rows: Sequence[int] | None = None) -> ChoiceRows:
    """As a runner would pack them."""

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    return ChoiceRows(
        logits_rows=column(range(len(wishes)) if logits_rows is None else logits_rows, torch.int64),
        temperature=column([w.temperature for w in wishes], torch.float32),
        top_k=column([w.top_k for w in wishes], torch.int32),
        top_p=column([w.top_p for w in wishes], torch.float64),
        min_p=column([w.min_p for w in wishes], torch.float32),
        seed=column([signed(w.seed) for w in wishes], torch.int64),
        choice=column([w.choice for w in wishes], torch.int64),
        position=column([w.position for w in wishes], torch.int64),
        draws=any(w.temperature for w in wishes),
        limits_k=any(w.top_k for w in wishes),
        limits_p=any(w.top_p < 1 for w in wishes),
    )


def signed(number: int) -> int:
    """The int64 with the bits of a number modulo 2^64."""
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number


def sampled(
    logits: torch.Tensor, wishes: Sequence[Wish], logits_rows: Sequence[int] | None = None
) -> list[SampledToken]:
    """What the CPU's sampler chooses."""
    rows = [
        SampleRow(
            sampling=SamplingParams(
                temperature=w.temperature, top_k=w.top_k, top_p=w.top_p, min_p=w.min_p, seed=w.seed
            ),
            stop=StopParams(max_new_tokens=1),
            choice=w.choice,
            prompt_token_ids=(),
            output_token_ids=(),
            position=w.position,
            logits_row=i if logits_rows is None else logits_rows[i],
        )
        for i, w in enumerate(wishes)
    ]
    return sample(logits.cpu(), rows)

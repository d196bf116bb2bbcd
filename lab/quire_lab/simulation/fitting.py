"""Fits a cost model to measured steps: robust non-negative least squares for decodes, a rising table for prompts.

Promises: outliers have little effect; no coefficient is below 0; the stated error is that of held-out steps. Must not
know: torch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from statistics import fmean, median
from typing import Any

from quire_engine.contract.errors import ConfigError
from quire_engine.cost_model import CostModel, StepSizes

LARGEST_ERROR = 0.15  # of a cost model that a simulation may rest on
_HELD_OUT = 0.2
_ROUNDS = 12  # rounds of reweighting
_HUBER = 1.5  # residuals above so many robust deviations are weighted down
_BUCKETS_PER_DOUBLING = 2
_FEWEST = 8  # fewest measured steps of a kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A measured step."""

    sizes: StepSizes
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """The relative errors on held-out steps: |predicted - measured| / measured."""

    decode_steps: int
    decode_median: float
    decode_mean: float
    prompt_steps: int
    prompt_median: float
    prompt_mean: float

    @property
    def largest(self) -> float:
        """The larger of the two means: a load has steps of both kinds.

        It judges a cost model. The median would not do: it stays small where another process delays a third of the
        steps.
        """
        return max(self.decode_mean, self.prompt_mean)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> FitError:
        """Read the entry `fit_error` of a calibration file. Raises ConfigError."""
        try:
            numbers: dict[str, Any] = {one.name: float(plain[one.name]) for one in fields(cls)}
            return cls(**numbers)
        except (KeyError, TypeError, ValueError):
            raise ConfigError("the calibration's fit_error is none; `quire calibrate` writes another") from None

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"mean error on held-out steps {self.decode_mean:.1%} of decodes, {self.prompt_mean:.1%} with prompts"


def fit(samples: Sequence[Sample], *, seed: int = 0) -> tuple[CostModel, FitError]:
    """A model of all samples, and the error on a fifth of each kind of a model of the others. Raises ConfigError."""
    shuffled = list(samples)
    random.Random(seed).shuffle(shuffled)
    held: list[Sample] = []
    for of_prompts in (False, True):
        kind = [one for one in shuffled if one.sizes.has_prompts == of_prompts]
        held += kind[: max(1, round(_HELD_OUT * len(kind)))]
    known = {id(one) for one in held}
    return fit_all(samples), error_of(fit_all([one for one in shuffled if id(one) not in known]), held)


def error_of(model: CostModel, samples: Sequence[Sample]) -> FitError:
    """The relative errors of a model."""

    def errors(of_prompts: bool) -> list[float]:
        chosen = [sample for sample in samples if sample.sizes.has_prompts == of_prompts]
        return [abs(model.seconds_of(one.sizes) - one.seconds) / one.seconds for one in chosen]

    decode, prompt = errors(False), errors(True)
    return FitError(
        decode_steps=len(decode),
        decode_median=median(decode) if decode else 0.0,
        decode_mean=fmean(decode) if decode else 0.0,
        prompt_steps=len(prompt),
        prompt_median=median(prompt) if prompt else 0.0,
        prompt_mean=fmean(prompt) if prompt else 0.0,
    )


def fit_all(samples: Sequence[Sample]) -> CostModel:
    """The model of all samples. Raises ConfigError if there are too few of a kind."""
    decodes = [one for one in samples if not one.sizes.has_prompts]
    prompts = [one for one in samples if one.sizes.has_prompts]
    if len(decodes) < _FEWEST or len(prompts) < _FEWEST:
        raise ConfigError(
            f"{len(decodes)} steps of decodes and {len(prompts)} with prompts are too few to fit; measure for longer"
        )
    rows = [(1.0, float(one.sizes.num_decodes), float(one.sizes.context)) for one in decodes]
    step, row, context = least_squares(rows, [one.seconds for one in decodes])
    model = CostModel(step=step, row=row, context=context)
    # First the slope, with a table from chunks at the beginning of prompts; then the table from all chunks.
    looked_back = [one for one in prompts if one.sizes.before > one.sizes.num_tokens]
    first = [one for one in prompts if one.sizes.before <= one.sizes.num_tokens]
    if len(looked_back) >= _FEWEST and len(first) >= _FEWEST:
        model = replace(model, prompt=_table(first, model))
        (chunk_context,) = least_squares(
            [(float(one.sizes.before),) for one in looked_back],
            [one.seconds - model.seconds_of(one.sizes) for one in looked_back],
            relative_to=[one.seconds for one in looked_back],
        )
        model = replace(model, chunk_context=chunk_context)
    return replace(model, prompt=_table(prompts, model))


def _table(samples: Sequence[Sample], model: CostModel) -> tuple[tuple[int, float], ...]:
    """The times of steps with prompts, less their attention to earlier tokens."""
    points = []
    for one in samples:
        looked_at = model.context * one.sizes.context + model.chunk_context * one.sizes.before
        points.append((one.sizes.num_tokens, one.seconds - looked_at))
    return rising_table(points)


def least_squares(
    rows: Sequence[tuple[float, ...]], values: Sequence[float], *, relative_to: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Coefficients of at least 0 with the least robust sum of squared relative residuals.

    Residuals are relative to `relative_to`, by default to the values, so that a step of 1 ms counts like one of 100 ms.
    """
    scale = [1.0 / max(value, 1e-12) for value in (relative_to or values)]
    weights = [1.0] * len(rows)
    found: tuple[float, ...] = (0.0,) * len(rows[0])
    for _ in range(_ROUNDS):
        found = _non_negative(rows, values, [w * s * s for w, s in zip(weights, scale, strict=True)])
        residuals = [
            abs(sum(c * x for c, x in zip(found, row, strict=True)) - value) * s
            for row, value, s in zip(rows, values, scale, strict=True)
        ]
        deviation = 1.4826 * median(residuals)
        if deviation <= 1e-12:
            break
        weights = [min(1.0, _HUBER * deviation / max(residual, 1e-12)) for residual in residuals]
    return found


def rising_table(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Medians of buckets of sizes, made to rise by pooling neighbours that fall."""
    buckets: dict[int, list[tuple[int, float]]] = {}
    for size, seconds in points:
        buckets.setdefault(_bucket(size), []).append((size, seconds))
    pools: list[tuple[float, float, list[int]]] = []  # weight, seconds, sizes
    for _, members in sorted(buckets.items()):
        size, seconds = round(median(m[0] for m in members)), max(median(m[1] for m in members), 1e-9)
        pools.append((float(len(members)), seconds, [size]))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (w2, s2, sizes2), (w1, s1, sizes1) = pools.pop(), pools.pop()
            pools.append((w1 + w2, (w1 * s1 + w2 * s2) / (w1 + w2), sizes1 + sizes2))
    return tuple((size, seconds) for _, seconds, sizes in pools for size in sizes)


def _bucket(size: int) -> int:
    """Sizes up to 8 have a bucket each; then `_BUCKETS_PER_DOUBLING` buckets per doubling."""
    if size <= 8:
        return size
    doublings = size.bit_length() - 1
    part = (size - (1 << doublings)) * _BUCKETS_PER_DOUBLING >> doublings
    return 8 + (doublings - 3) * _BUCKETS_PER_DOUBLING + part + 1


def _non_negative(
    rows: Sequence[tuple[float, ...]], values: Sequence[float], weights: Sequence[float]
) -> tuple[float, ...]:
    """The best solution over all sets of non-zero coefficients: with three of them there are seven sets."""
    width = len(rows[0])
    gram = [
        [sum(w * r[i] * r[j] for r, w in zip(rows, weights, strict=True)) for j in range(width)] for i in range(width)
    ]
    moment = [sum(w * r[i] * v for r, v, w in zip(rows, values, weights, strict=True)) for i in range(width)]
    best, least = (0.0,) * width, 0.0
    for count in range(1, width + 1):
        for chosen in combinations(range(width), count):
            solved = _solve([[gram[i][j] for j in chosen] for i in chosen], [moment[i] for i in chosen])
            if solved is None or min(solved) < 0:
                continue
            full = [0.0] * width
            for i, value in zip(chosen, solved, strict=True):
                full[i] = value
            loss = sum(
                full[i] * (sum(gram[i][j] * full[j] for j in range(width)) - 2 * moment[i]) for i in range(width)
            )
            if loss < least:
                best, least = tuple(full), loss
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivots, on scaled columns; None if they are linearly dependent."""
    size = len(right)
    scale = [matrix[i][i] ** 0.5 for i in range(size)]
    if min(scale) <= 0:
        return None
    rows = [[matrix[i][j] / (scale[i] * scale[j]) for j in range(size)] + [right[i] / scale[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(rows[row][column]))
        if abs(rows[pivot][column]) < 1e-10:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in range(size):
            if row != column:
                factor = rows[row][column] / rows[column][column]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] / scale[i] for i in range(size)]

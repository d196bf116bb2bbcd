"""Cost models from measured steps: what was put in comes out, outliers move nothing far, tables rise."""

from __future__ import annotations

import random

import pytest

from quire_engine.contract.errors import ConfigError
from quire_engine.cost_model import CostModel, StepSizes
from quire_lab.simulation.fitting import (
    LARGEST_ERROR,
    FitError,
    Sample,
    error_of,
    fit,
    fit_all,
    least_squares,
    rising_table,
)

TRUE = CostModel(
    step=0.002,
    row=0.0003,
    context=2e-7,
    prompt=tuple((1 << i, 0.002 + 0.0001 * (1 << i)) for i in range(10)),
    chunk_context=3e-8,
)


def samples(noise: float, outliers: float = 0.0) -> list[Sample]:
    rng, made = random.Random(1), []
    sizes = [StepSizes(b, b, b * c, 0) for b in (1, 2, 4, 8, 16, 32) for c in (16, 64, 256, 1024)]
    sizes += [StepSizes(1 << i, 0, 0, 0) for i in range(2, 10)]
    sizes += [StepSizes(512, 0, 0, 512 * start) for start in (512, 1024, 2048)]
    for _ in range(12):
        for one in sizes:
            seconds = TRUE.seconds_of(one) * rng.uniform(1 - noise, 1 + noise)
            made.append(Sample(sizes=one, seconds=seconds * (8 if rng.random() < outliers else 1)))
    return made


def close(found: CostModel, rel: float) -> bool:
    names = ("step", "row", "context", "chunk_context")
    return all(getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=rel) for name in names)


def test_what_was_put_in_comes_out() -> None:
    found = fit_all(samples(0.0))
    assert close(found, 1e-3)
    assert [found.prompt_seconds(size) for size in (4, 64, 512)] == pytest.approx(
        [TRUE.prompt_seconds(size) for size in (4, 64, 512)]
    )


def test_outliers_move_nothing_far() -> None:
    found, error = fit(samples(0.03, outliers=0.05))
    assert close(found, 0.15)
    assert error.decode_median < 0.03
    assert error.prompt_median < 0.03
    assert error.decode_steps + error.prompt_steps == round(0.2 * 12 * 35)


def test_the_error_is_of_steps_that_were_not_fitted() -> None:
    """Noise cannot be learned: where it is 30 %, a fit of three numbers is off by about half of that."""
    _, error = fit(samples(0.3))
    assert 0.08 < error.decode_median < 0.25
    assert error_of(TRUE, samples(0.0)).decode_mean == pytest.approx(0.0, abs=1e-12)


def test_steps_that_another_process_delays_count_in_the_error_that_judges() -> None:
    """A third of the steps takes eight times as long: the median does not show it, the mean does."""
    _, quiet = fit(samples(0.03))
    _, loaded = fit(samples(0.03, outliers=0.33))
    assert quiet.largest < LARGEST_ERROR < loaded.largest
    assert min(loaded.decode_median, loaded.prompt_median) < LARGEST_ERROR


def test_an_error_is_read_from_its_plain_form() -> None:
    _, error = fit(samples(0.03))
    assert FitError.from_plain(error.as_plain()) == error
    assert str(error).startswith(f"mean error on held-out steps {error.decode_mean:.1%} of decodes")
    for wrong in ({}, error.as_plain() | {"decode_mean": "x"}, []):
        with pytest.raises(ConfigError, match="fit_error"):
            FitError.from_plain(wrong)  # type: ignore[arg-type]


def test_coefficients_are_not_negative() -> None:
    rows = [(1.0, float(x)) for x in range(1, 20)]
    assert least_squares(rows, [100.0 - x for x in range(1, 20)])[1] == 0.0
    assert least_squares(rows, [3.0 * x for x in range(1, 20)]) == pytest.approx((0.0, 3.0))


def test_tables_rise() -> None:
    table = rising_table([(1, 1.0), (2, 3.0), (4, 2.0), (8, 5.0), (8, 5.0), (8, 90.0)])
    assert table == ((1, 1.0), (2, 2.5), (4, 2.5), (8, 5.0))


def test_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="measure for longer"):
        fit(samples(0.0)[:10])

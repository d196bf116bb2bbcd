"""The C++ projections on every instruction set of this CPU: definitions, poison, and rows bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire_kernels.cpu.variants import usable_variants
from quire_kernels.kernel_set import Norm
from quire_kernels.reference import REFERENCE
from support.activations import EXPECTED
from support.cpu_linear import (
    BF16_ROUNDING,
    EPS,
    FLOAT32_ROUNDING,
    KINDS,
    SHAPES,
    apply_ops,
    assert_within,
    kernel_set,
    normed_rows,
    operands,
    product,
    run_ops,
)

ALL_ROWS = 70
# Around the sizes of tiles; between them a row has the bits that it has among all, as is tested below.
SOME_ROWS = (*range(1, 10), 13, 14, 15, 16, 17, 32, 33, 64, 69, ALL_ROWS)


@pytest.fixture(scope="module", params=[variant.name for variant in usable_variants()])
def variant(request):
    return request.param


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_are_normed_as_defined(variant, n, k):
    given = operands(n, k, 5)
    wide = given.x.double()
    exact = wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + EPS) * given.norm.double()
    # Rounded to bfloat16 before and after the product with the weight; the mean is a float32 sum of k values.
    bound = ((1 + BF16_ROUNDING) ** 2 * (1 + (k + 4) * FLOAT32_ROUNDING) - 1) * exact.abs()
    assert_within(normed_rows(variant, given), exact, bound)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_are_centred_and_normed_as_defined(variant, n, k):
    given = operands(n, k, 5)
    given = given._replace(x=given.x + 3)
    wide, weight = given.x.double(), given.norm.float()
    exact = torch.nn.functional.layer_norm(wide, (k,), weight.double(), eps=EPS)
    # The mean is a float32 sum of k values of about 3, and its error moves every value.
    moved = (k + 4) * FLOAT32_ROUNDING * wide.abs().mean(dim=-1, keepdim=True) * weight.double().abs()
    bound = ((1 + BF16_ROUNDING) * (1 + (k + 4) * FLOAT32_ROUNDING) - 1) * exact.abs() + 4 * moved
    assert_within(normed_rows(variant, given, Norm(weight, EPS, True)), exact, bound)
    with pytest.raises(ValueError, match="centred norm must be float32"):
        normed_rows(variant, given, Norm(given.norm, EPS, True))


@pytest.mark.parametrize("m", [1, 2, 3, 5, 6, 7, 13, 70])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_as_exact_as_float32_sums(variant, n, k, m):
    given = operands(n, k, m)
    got = run_ops(kernel_set(variant), given)
    normed = normed_rows(variant, given)

    exact, bound = product(normed, given.weight)
    assert_within(got["logits"], exact, bound)

    exact, bound = product(normed, given.weight, given.bias)
    assert_within(got["norm_linear"], exact, bound + BF16_ROUNDING * (exact.abs() + bound))

    for name, bias in (("linear_add", None), ("linear_add_bias", given.bias)):
        exact, bound = product(given.x, given.weight, bias)
        exact, bound = exact + given.residual.double(), bound + 2 * FLOAT32_ROUNDING * (exact.abs() + bound)
        bound += 2 * FLOAT32_ROUNDING * given.residual.double().abs()
        assert_within(got[name], exact, bound + BF16_ROUNDING * (exact.abs() + bound))

    (gate, up), (gate_bound, up_bound) = (part.chunk(2, dim=1) for part in product(normed, given.weight, given.bias))
    silu = gate * torch.sigmoid(gate)
    exact = silu * up
    # |silu'| <= 1.1; the exponential, the quotient and the product are good to a few units in the last place.
    silu_bound = 1.1 * gate_bound + 8 * FLOAT32_ROUNDING * silu.abs()
    bound = silu_bound * (up.abs() + up_bound) + silu.abs() * up_bound + FLOAT32_ROUNDING * exact.abs()
    assert_within(got["norm_gate_up silu"], exact, bound + BF16_ROUNDING * (exact.abs() + bound))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_reference_agrees(variant, n, k):
    """For 1 to 70 rows. Both round their results to bfloat16; the reference rounds projections before that too."""
    for m in SOME_ROWS if k < 1000 else (1, 18, 35, 52, 69):
        given = operands(n, k, m, seed=m)
        expected = run_ops(REFERENCE, given)
        gate, up = product(normed_rows(variant, given), given.weight, given.bias)[0].chunk(2, dim=1)
        for name, rows in run_ops(kernel_set(variant), given).items():
            result = expected[name].double()
            roundings = 2 * result.abs()
            if name.startswith("norm_gate_up"):
                activation = EXPECTED[name.removeprefix("norm_gate_up ")]
                active, factor = activation.activate(gate), activation.factor(up)
                roundings += activation.steepest * gate.abs() * factor.abs() + active.abs() * up.abs()
            elif name.startswith("linear_add"):
                roundings += (result - given.residual.double()).abs()
            # By rows: where float32 sums of squares differ, single normed values may round the other way.
            distance = (rows.double() - result).norm(dim=1)
            assert (distance <= 1.01 * BF16_ROUNDING * roundings.norm(dim=1)).all(), (name, m)


def test_gates_far_from_zero_are_right(variant):
    """silu(g) is 0 for very negative g and g for very positive g, without overflow on the way."""
    kernels = kernel_set(variant)
    gates = torch.tensor([-3e38, -1e4, -200.0, -100.0, -90.0, -88.0, -87.0, -20.0, 0.0, 20.0, 90.0, 1e4]).bfloat16()
    weight = torch.zeros(len(gates), 32).bfloat16()
    bias = torch.cat([gates, torch.ones(len(gates)).bfloat16()])
    got = kernels.norm_gate_up(
        torch.ones(1, 32).bfloat16(),
        Norm(torch.ones(32).bfloat16(), EPS),
        kernels.pack_gate_up(weight, weight, bias),
        "silu",
    )
    exact = gates.double() * torch.sigmoid(gates.double())
    assert_within(got[0], exact, 1.01 * BF16_ROUNDING * exact.abs() + 1e-34)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(130, 33), (96, 100), (72, 8352)])
def test_a_row_does_not_depend_on_the_others(variant, kind, n, k):
    """Bitwise, for 1 to 70 rows, wherever the row stands, with one, two and three threads."""
    given = operands(n, k, ALL_ROWS)
    kernels = kernel_set(variant, kind)
    packed = _packed(kernels, given)
    together = apply_ops(kernels, given, *packed)
    counts = range(1, ALL_ROWS + 1) if k < 1000 else (1, 2, 7, 31, 69)
    for m in counts:
        start = (7 * m) % (ALL_ROWS - m + 1)
        part = apply_ops(kernels, given.rows(slice(start, start + m)), *packed)
        for name, rows in part.items():
            assert torch.equal(rows, together[name][start : start + m]), (name, m)
    order = torch.randperm(ALL_ROWS, generator=torch.Generator().manual_seed(1))
    for name, rows in apply_ops(kernels, given.rows(order), *packed).items():
        assert torch.equal(rows, together[name][order]), name
    for threads, counts in ((1, (1, 2, 33, ALL_ROWS)), (3, (1, 50))):
        other = kernel_set(variant, kind, threads)
        packed = _packed(other, given)
        for m in counts:
            for name, rows in apply_ops(other, given.rows(slice(0, m)), *packed).items():
                assert torch.equal(rows, together[name][:m]), (name, threads, m)


@pytest.mark.parametrize("threads", [1, 3, 7])
def test_a_row_does_not_depend_on_how_many_there_are(variant, threads):
    """Bitwise, where rows are more than a worker takes at once, and where panels are fewer than workers."""
    n, k, m = 130, 1120, 600
    given = operands(n, k, m)
    kernels = kernel_set(variant, None, threads)
    packed = _packed(kernels, given)
    together = apply_ops(kernels, given, *packed)
    for first, count in ((0, 1), (1, 40), (41, 259), (300, 300)):
        for name, rows in apply_ops(kernels, given.rows(slice(first, first + count)), *packed).items():
            assert torch.equal(rows, together[name][first : first + count]), (name, count)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_row_stays_alone(variant, kind, poison):
    """NaN rows between the others and in the memory around them: they yield NaN, the others do not change."""
    n, k = 130, 100
    clean = operands(n, k, ALL_ROWS)
    kernels = kernel_set(variant, kind)
    packed = _packed(kernels, clean)
    expected = apply_ops(kernels, clean, *packed)
    sick = torch.zeros(ALL_ROWS + 10, dtype=torch.bool)
    sick[[0, 1, 2, 3, 4, 11, 40, 75, 76, 77, 78, 79]] = True
    sick[[1, 3]] = False
    x = torch.full((ALL_ROWS + 10, k), poison).bfloat16()
    x[~sick] = clean.x
    x[sick, 1:] = 1.0  # a single value is enough
    residual = torch.zeros(ALL_ROWS + 10, n).bfloat16()
    residual[~sick] = clean.residual
    given = clean._replace(x=x, residual=residual).rows(slice(1, 79))
    for name, rows in apply_ops(kernels, given, *packed).items():
        assert torch.equal(rows[~sick[1:79]], expected[name]), name
        finite = torch.isfinite(rows[sick[1:79]])
        # Where nothing is multiplied, an infinity spoils its own column, and makes the others zero.
        assert not (finite.all(dim=1) if name.startswith(("norm_add", "mul_sigmoid")) else finite).any(), name


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_are_no_work(variant, kind):
    for name, rows in run_ops(kernel_set(variant, kind), operands(64, 32, 0)).items():
        assert len(rows) == 0, name


def test_zero_rows_and_zero_weights_give_zero(variant):
    for kind in KINDS:
        kernels = kernel_set(variant, kind)
        given = operands(66, 64, 4)
        for x, weight in ((torch.zeros_like(given.x), given.weight), (given.x, torch.zeros_like(given.weight))):
            w = kernels.pack_linear(weight, None)
            assert torch.equal(kernels.logits(x, Norm(given.norm, EPS), w), torch.zeros(4, 66))
            assert torch.equal(kernels.linear_add(x, w, given.residual.clone()), given.residual)


def test_tiny_products_are_alike_in_any_batch(variant):
    """Whether denormals are zeros is the instruction set's affair, but the same for every number of rows."""
    n, k = 130, 96
    given = operands(n, k, 20)
    kernels = kernel_set(variant)
    packed = kernels.pack_linear((given.weight.float() * 2.0**-67).bfloat16(), None)
    x, zeros = (given.x.float() * 2.0**-56).bfloat16(), torch.zeros(20, n).bfloat16()
    together = kernels.linear_add(x, packed, zeros.clone())
    assert together.any()
    for m in range(1, 20):
        assert torch.equal(kernels.linear_add(x[:m], packed, zeros[:m].clone()), together[:m]), m


def test_the_caller_keeps_its_denormals(variant):
    given = operands(64, 64, 8)
    kernels = kernel_set(variant)
    packed = kernels.pack_linear(given.weight, None)
    small = torch.full((64,), 1e-39)
    for m in (1, 8):
        kernels.linear_add(given.x[:m], packed, given.residual[:m].clone())
        assert (small * 0.5 > 0).all(), m


def test_callers_on_several_threads_wait_for_each_other(variant):
    given = operands(130, 100, 9)
    kernels = kernel_set(variant)
    packed = _packed(kernels, given)
    expected = apply_ops(kernels, given, *packed)
    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(lambda _: apply_ops(kernels, given, *packed), range(40)):
            assert all(torch.equal(rows, expected[name]) for name, rows in results.items())


def test_rows_that_are_not_contiguous_are_read_right(variant):
    given = operands(96, 100, 12)
    kernels = kernel_set(variant)
    packed = _packed(kernels, given)
    expected = apply_ops(kernels, given, *packed)
    spread = given._replace(x=given.x.T.contiguous().T, residual=given.residual.T.contiguous().T)
    for name, rows in apply_ops(kernels, spread, *packed).items():
        assert torch.equal(rows, expected[name]), name


def test_wrong_arguments_are_refused():
    kernels = kernel_set(usable_variants()[0].name)
    given = operands(64, 64, 3)
    w = kernels.pack_linear(given.weight, None)
    with pytest.raises(ValueError, match=r"expected bfloat16 \[rows, 64\]"):
        kernels.norm_linear(given.x.float(), Norm(given.norm, EPS), w)
    with pytest.raises(ValueError, match=r"expected bfloat16 \[rows, 64\]"):
        kernels.norm_linear(given.x[:, :32], Norm(given.norm[:32], EPS), w)
    with pytest.raises(ValueError, match=r"norm must be"):
        kernels.logits(given.x, Norm(given.norm[:32], EPS), w)
    with pytest.raises(ValueError, match=r"3 rows cannot be added to 2"):
        kernels.linear_add(given.x, w, given.residual[:2])
    with pytest.raises(ValueError, match="share memory"):
        kernels.linear_add(given.x, w, given.x)
    with pytest.raises(ValueError, match="bfloat16"):
        kernels.pack_linear(given.weight.float(), None)
    with pytest.raises(ValueError, match="at most 65536 columns"):
        kernels.pack_linear(torch.zeros(1, 65537).bfloat16(), None)
    with pytest.raises(ValueError, match="one shape"):
        kernels.pack_gate_up(given.weight, given.weight[:32], None)


def _packed(kernels, given):
    weight, bias = given.weight, given.bias
    return (
        kernels.pack_linear(weight, None),
        kernels.pack_linear(weight, bias),
        kernels.pack_gate_up(*given.halves, bias),
    )

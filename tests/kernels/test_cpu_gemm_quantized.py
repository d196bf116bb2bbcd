"""Packed and quantised weights: their layout read back, and products equal to integer arithmetic to the last bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from quire_kernels.cpu.variants import usable_variants
from quire_kernels.kernel_set import Norm
from support.cpu_linear import BF16_ROUNDING, EPS, KINDS, SHAPES, kernel_set, normed_rows, operands

PANEL, GROUP = 64, 32


@pytest.fixture(scope="module", params=[variant.name for variant in usable_variants()])
def variant(request):
    return request.param


def padded(weight):
    """[N, K] with zero rows and columns up to whole panels and groups, as float32."""
    n, k = weight.shape
    whole = torch.zeros(-(-n // PANEL) * PANEL, -(-k // GROUP) * GROUP)
    whole[:n, :k] = weight.float()
    return whole


def paired(gate, up):
    """The rows of a gate-up pair in the order of the panels: 32 of the gate, the same 32 of up, and so on."""
    half = PANEL // 2
    rows = -(-len(gate) // half) * half
    pair = torch.zeros(2, rows, gate.shape[1])
    pair[0, : len(gate)], pair[1, : len(up)] = gate, up
    return pair.view(2, -1, half, gate.shape[1]).transpose(0, 1).flatten(0, 2)


def steps_to_rows(panels, values_per_step):
    """[P, steps, 64, values] -> [P * 64, steps * values]."""
    return panels.view(len(panels), -1, PANEL, values_per_step).transpose(1, 2).flatten(2).flatten(0, 1)


def unpack_bf16(w):
    """[rows, k], whatever padding is; a panel that is shorter than its weights is coded (coded.h)."""
    memory, starts = w.parts["packed"], w.parts["starts"]
    panels = [memory[start:end] for start, end in pairwise(starts.tolist())]
    plain = PANEL * w.args.k * 2
    steps = [panel.view(torch.bfloat16) if len(panel) == plain else decoded(panel, w.args.k // 2) for panel in panels]
    return steps_to_rows(torch.stack(steps), 2).float()


def decoded(panel, steps):
    """[steps * 128] of a coded panel: its lowest exponent, repairs, then sign and mantissa apart from exponents."""
    lowest, repairs = panel[:8].view(torch.int32).tolist()
    first = -(-(8 + 8 * (repairs + 1)) // 64) * 64
    words = panel[first:].view(torch.int16).view(steps, 3, 32).int() & 0xFFFF
    vectors = []
    for vector in range(4):
        kept = words[:, vector // 2]
        if vector % 2:
            kept = (kept >> 8 | kept << 8) & 0xFFFF
        exponents = (words[:, 2] >> 4 * vector & 15) + lowest
        vectors.append(kept & 0x807F | exponents << 7)
    bits = torch.stack(vectors, dim=1).short().flatten()
    for entry in panel[8 : 8 + 8 * repairs].view(-1, 8):
        at, value = entry[4:].view(torch.int16).tolist()
        bits[int(entry[:4].view(torch.int32)) * 128 + at] = value
    return bits.view(torch.bfloat16)


def unpack_int8(w):
    """Codes [rows, k], scales [rows], and the stored sums."""
    codes = steps_to_rows(w.parts["packed"].view(torch.int8).view(-1, PANEL * w.args.k), 4)
    return codes.long(), w.parts["scales"], w.parts["sums"]


def unpack_int4(w):
    """Codes -8..7 [rows, k], scales [rows, groups]."""
    groups = w.parts["packed"].view(-1, w.args.k // GROUP, PANEL + PANEL * GROUP // 2)
    relative = scale_of(groups[..., :PANEL])  # [P, groups, 64]
    scales = relative.transpose(1, 2) * w.parts["scales"].view(-1, PANEL, 1)  # powers of two: exact
    pairs = groups[..., PANEL:].view(*groups.shape[:2], 4, PANEL, 4).transpose(2, 3).flatten(3)  # [P, g, 64, 16]
    codes = torch.cat([pairs & 15, pairs >> 4], dim=-1).long() - 8  # [P, g, 64, 32]
    return codes.transpose(1, 2).flatten(2).flatten(0, 1), scales.flatten(0, 1)


def scale_of(code):
    """Sign, three bits of exponent, four of mantissa."""
    exponent, mantissa = (code >> 4 & 7).int() - 7, 1 + (code & 15).float() / 16
    return torch.where(code > 127, -1.0, 1.0) * torch.ldexp(mantissa, exponent)


def nearest_scale(scale, largest):
    """The scale that a byte can tell, relative to the power of two that a row's `largest` value asks for."""
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest / 6.5)[1] - 1)
    mantissa, exponent = torch.frexp(scale.abs() / unit)
    rounded = torch.ldexp(torch.round(mantissa * 32) / 32, exponent).clamp(2.0**-7, 1.9375)
    return torch.where(scale < 0, -rounded, rounded) * unit


def quantized(rows):
    """Symmetric codes of -127..127 and one scale per row, in float32 as the kernels do it."""
    rows = rows.float()
    most = rows.abs().amax(dim=1, keepdim=True)
    limit = torch.full_like(
        most, 127
    )  # tensors on both sides: torch divides by a number, or one by a tensor, otherwise
    inverse = torch.where(most > 0, limit / most, 0.0)
    return torch.round(rows * inverse).clamp(-127, 127).long(), most / limit


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packed_bf16_holds_the_matrix(variant, n, k):
    kernels, given = kernel_set(variant), operands(n, k, 1)
    ones = torch.ones(n, k)
    for w, rows, real in (
        (kernels.pack_linear(given.weight, None), padded(given.weight), padded(ones)),
        (kernels.pack_gate_up(*given.halves, None), padded(paired(*given.halves)), padded(paired(*ones.chunk(2)))),
    ):
        unpacked = unpack_bf16(w)
        assert torch.isfinite(unpacked).all()
        assert torch.equal(unpacked * real, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_matrix_owns_its_memory(variant, kind):
    kernels, given = kernel_set(variant, kind), operands(130, 100, 3)
    weight, bias = given.weight.clone(), given.bias.clone()
    matrices = [kernels.pack_linear(weight, bias), kernels.pack_gate_up(*weight.chunk(2), bias)]
    norm = Norm(given.norm, EPS)

    def computed() -> list[torch.Tensor]:
        return [
            kernels.norm_linear(given.x, norm, matrices[0]),
            kernels.norm_gate_up(given.x, norm, matrices[1], "silu"),
        ]

    before = computed()
    weight.fill_(float("nan"))
    bias.fill_(float("nan"))
    more = kernels.pack_linear(given.weight[:64] * 3, None)
    assert all(map(torch.equal, computed(), before))
    spans = sorted((w.args.packed, w.args.packed + w.parts["packed"].nbytes) for w in [*matrices, more])
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packed_int8_is_the_matrix_rounded_by_rows(variant, n, k):
    kernels, given = kernel_set(variant, "int8"), operands(n, k, 1)
    for packed, rows in (
        (kernels.pack_linear(given.weight, None), given.weight),
        (kernels.pack_gate_up(*given.halves, None), paired(*given.halves)),
    ):
        codes, scales, sums = unpack_int8(packed)
        expected, steps = quantized(padded(rows))
        assert torch.equal(codes, expected)
        assert torch.equal(scales, steps[:, 0])
        assert torch.equal(sums, 128 * expected.sum(dim=1).int())


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_packed_int4_is_the_matrix_rounded_by_groups(variant, n, k):
    kernels, given = kernel_set(variant, "int4"), operands(n, k, 1)
    for packed, rows in (
        (kernels.pack_linear(given.weight, None), given.weight),
        (kernels.pack_gate_up(*given.halves, None), paired(*given.halves)),
    ):
        values = padded(rows).view(-1, GROUP)
        codes, scales = unpack_int4(packed)
        codes, scales = codes.view(-1, GROUP), scales.reshape(-1, 1)
        assert torch.equal(codes, torch.round(values * scales.reciprocal()).clamp(-8, 7).long())
        # Never worse than the usual scale, which maps the extreme value to -8, and better on the whole.
        extreme = values.gather(1, values.abs().argmax(dim=1, keepdim=True))
        largest = padded(rows).abs().amax(dim=1).clamp(min=1e-35)
        usual = nearest_scale(extreme / -8, largest.repeat_interleave(len(values) // len(largest))[:, None])
        baseline = ((values / usual).round().clamp(-8, 7) * usual - values).square().sum(dim=1)
        error = (codes * scales - values).square().sum(dim=1)
        assert (error <= baseline * (1 + 1e-5)).all()
        assert n * k < 1000 or error.sum() < 0.95 * baseline.sum()


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 16, 33, 70])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, (70, 2112)])  # tiles, which need k in 64s, and slices
def test_int8_products_are_exact(variant, n, k, m):
    kernels, given = kernel_set(variant, "int8"), operands(n, k, m)
    weight, weight_scale = quantized(given.weight)

    def product(rows):
        codes, scale = quantized(rows)
        return (codes.double() @ weight.double().T).float() * (weight_scale.T * scale)

    packed = kernels.pack_linear(given.weight, given.bias)
    expected = (product(given.x) + given.bias.float() + given.residual.float()).bfloat16()
    assert torch.equal(kernels.linear_add(given.x, packed, given.residual.clone()), expected)

    expected = product(normed_rows(variant, given)) + given.bias.float()
    assert torch.equal(kernels.logits(given.x, Norm(given.norm, EPS), packed), expected)
    assert torch.equal(kernels.norm_linear(given.x, Norm(given.norm, EPS), packed), expected.bfloat16())
    assert_gated(kernels, given, expected)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 7, 16, 33, 70])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_int4_products_are_exact_within_groups(variant, n, k, m):
    kernels, given = kernel_set(variant, "int4"), operands(n, k, m)
    packed = kernels.pack_linear(given.weight, given.bias)
    weight, weight_scales = unpack_int4(packed)

    def product(rows):
        codes, scale = quantized(rows)
        codes = torch.nn.functional.pad(codes, (0, packed.args.k - k)).double()
        total = torch.zeros(m, n)
        for group in range(packed.args.k // GROUP):
            columns = slice(group * GROUP, (group + 1) * GROUP)
            part = (codes[:, columns] @ weight[:n, columns].double().T).float()
            total += part * weight_scales[:n, group]  # 15 bits by 8: exact, so a fused sum rounds alike
        return total * scale

    expected = (product(given.x) + given.bias.float() + given.residual.float()).bfloat16()
    assert torch.equal(kernels.linear_add(given.x, packed, given.residual.clone()), expected)

    expected = product(normed_rows(variant, given)) + given.bias.float()
    assert torch.equal(kernels.logits(given.x, Norm(given.norm, EPS), packed), expected)
    assert_gated(kernels, given, expected)


@pytest.mark.parametrize("m", [1, 2, 4, 70])
def test_the_largest_sums_fit(variant, m):
    """All activations at 127 and, in every group, all weights but one at the end of their range."""
    n, k = 64, 2048
    weight = torch.full((n, k), 7.0)
    weight[:, ::GROUP] = -8.0
    weight[1::2] *= -1
    weight[:, 5::GROUP] *= torch.linspace(0.5, 1, n)[:, None]  # not all rows alike
    x, zeros = torch.ones(m, k).bfloat16(), torch.zeros(m, n).bfloat16()
    x[::2] *= -1

    packed = kernel_set(variant, "int4").pack_linear(weight.bfloat16(), None)
    codes, scales = unpack_int4(packed)
    assert (codes == 7).sum() >= 30 / 32 * codes.numel()
    exact = (codes.double() * scales.double().repeat_interleave(GROUP, dim=1)).sum(dim=1) * x[:, :1].double()
    got = kernel_set(variant, "int4").linear_add(x, packed, zeros.clone()).double()
    assert ((got - exact).abs() <= 1.01 * BF16_ROUNDING * exact.abs()).all()

    codes, scales = quantized(weight.bfloat16())
    packed = kernel_set(variant, "int8").pack_linear(weight.bfloat16(), None)
    expected = ((127 * x.double()) @ codes.double().T).float() * (scales.T * (1 / torch.tensor(127.0)))
    assert torch.equal(kernel_set(variant, "int8").linear_add(x, packed, zeros.clone()), expected.bfloat16())


def assert_gated(kernels, given, projected):
    """A gate-up pair multiplies as the two matrices do; only silu is not bitwise torch's."""
    gate, up = projected.chunk(2, dim=1)
    pair = kernels.pack_gate_up(*given.halves, given.bias)
    got = kernels.norm_gate_up(given.x, Norm(given.norm, EPS), pair, "silu").double()
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    assert ((got - exact).abs() <= 1.001 * 2**-8 * exact.abs() + 1e-34).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_extreme_values_quantise_without_harm(variant, kind):
    """Magnitudes near the ends of bfloat16, in rows and in weights: finite, and right in size."""
    kernels = kernel_set(variant, kind)
    norm = torch.ones(64).bfloat16()
    for size in (1e-36, 1e-20, 1.0, 1e18):
        weight = torch.full((64, 64), size).bfloat16()
        weight[:, ::2] *= -0.5
        packed = kernels.pack_linear(weight, None)
        x = torch.ones(1, 64).bfloat16()
        x[:, ::2] = 0.0
        got = kernels.linear_add(x, packed, torch.zeros(1, 64).bfloat16()).double()
        exact = 32 * weight[0, 1].double()
        assert ((got / exact - 1).abs() < 0.02).all(), size
        rows = (weight[:1].float() / size * 1e-38).bfloat16()
        assert torch.isfinite(kernels.linear_add(rows, packed, torch.zeros(1, 64).bfloat16())).all()
        assert torch.isfinite(kernels.logits(rows, Norm(norm, EPS), packed)).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_broken_weights_are_not_hidden(variant, kind):
    kernels = kernel_set(variant, kind)
    for broken in (float("nan"), float("inf")):
        weight = torch.ones(70, 96).bfloat16()
        weight[66, 40] = broken
        got = kernels.linear_add(
            torch.ones(2, 96).bfloat16(), kernels.pack_linear(weight, None), torch.zeros(2, 70).bfloat16()
        )
        assert not torch.isfinite(got[:, 66]).any()
        assert torch.isfinite(got[:, :66]).all()
        assert torch.isfinite(got[:, 67:]).all()

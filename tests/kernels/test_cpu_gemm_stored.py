"""Matrices as others quantised them: read back exactly, products as exact as of bf16, and rows bit for bit."""

from __future__ import annotations

import pytest
import torch

from quire_kernels.cpu.variants import usable_variants
from quire_kernels.kernel_set import Norm
from support.cpu_linear import (
    BF16_ROUNDING,
    EPS,
    FLOAT32_ROUNDING,
    apply_ops,
    assert_within,
    kernel_set,
    normed_rows,
    operands,
)
from support.cpu_stored import FORMS, stored_matrix

PANEL, UNITS = 64, 256
ALL_ROWS = 70
# N, K: remainders of lanes and of panels; columns that end within a group; several spans; more than a slice.
SHAPES = ((64, 32), (2, 16), (130, 96), (96, 100), (200, 1024), (72, 2112))


@pytest.fixture(scope="module", params=[variant.name for variant in usable_variants()])
def variant(request):
    return request.param


def halves(matrix):
    rows = matrix.shape[0] // 2
    return [matrix.over_rows(lambda part: part[:rows])], [matrix.over_rows(lambda part: part[rows:])]


def packed_of(kernels, matrix, bias):
    return (
        kernels.pack_stored([[matrix]], None),
        kernels.pack_stored([[matrix]], bias),
        kernels.pack_stored(halves(matrix), bias),
    )


def numbers(memory, form):
    """Scales or offsets of a header [P, G, bytes] -> [P, G, 64] float32."""
    dtype = {0: torch.float16, 1: torch.bfloat16, 2: torch.float32, 3: torch.int8}[form]
    return memory.contiguous().view(dtype).float()


def unpacked(words, width):
    """[P, L, 64, 2] words of 16 bits -> [P, L, 16 / width, 64, 2], the lowest bits first."""
    return torch.stack([words >> width * step & (1 << width) - 1 for step in range(16 // width)], dim=2)


def read_back(w):
    """[P * 64, k] float32 from a packed matrix's memory, by the description in weights/stored.h."""
    args, memory = w.args, w.parts["packed"].view(len(w.parts["starts"]) - 1, -1)
    columns = 32 if args.group % 32 == 0 else 16
    width = {3: 4, 6: 6}.get(args.kind, 8)
    with_units = args.scale_form == 3 or args.offset_form == 5
    scale_size = {0: 2, 1: 2, 2: 4, 3: 1}[args.scale_form]
    offset_size = {0: 0, 1: 1, 2: 2, 3: 2, 4: 4, 5: 1}[args.offset_form]
    found, at = [], 0
    for first in range(0, args.k, args.group):
        if with_units and first % UNITS == 0:
            sizes = (128 * (args.scale_form == 3), 128 * (args.offset_form == 5))
            scale_units = memory[:, at : at + sizes[0]].contiguous().view(torch.float16).float()
            offset_units = memory[:, at + sizes[0] : at + sum(sizes)].contiguous().view(torch.float16).float()
            at += sum(sizes)
        scales = numbers(memory[:, at : at + 64 * scale_size], args.scale_form)
        scales = scales * scale_units if args.scale_form == 3 else scales
        at += 64 * scale_size
        points = offsets = torch.zeros(len(memory), 64)
        if args.offset_form == 1:
            points = numbers(memory[:, at : at + 64], 3)
        elif args.offset_form > 1:
            offsets = numbers(memory[:, at : at + 64 * offset_size], args.offset_form - 2)
            offsets = offsets * offset_units if args.offset_form == 5 else offsets
        at += 64 * offset_size
        for _ in range(first, min(first + args.group, args.k), columns):
            size = columns * 64 * width // 8
            words = memory[:, at : at + size].contiguous().view(torch.int16).view(len(memory), -1, 64, 2).int() & 0xFFFF
            at += size
            # [P, loads, 64, 2] words -> [P, loads, steps of a load, 64, 2] -> columns in order
            if width == 6:
                low, high = words.view(len(memory), -1, 3, 64, 2).split([2, 1], dim=2)
                codes = unpacked(low.flatten(1, 2), 4).reshape(len(memory), -1, 8, 64, 2)
                codes |= unpacked(high.squeeze(2), 2) << 4
            else:
                codes = unpacked(words, width)
            codes = codes.permute(0, 3, 1, 2, 4).flatten(2)
            if args.kind == 3:
                values = w.parts["table"].float()[codes]
            elif args.kind == 6:
                values = torch.where(codes < 32, codes, codes - 64).float()
            else:
                values = codes.to(torch.uint8).view(torch.int8 if args.kind == 4 else torch.float8_e4m3fn).float()
            found.append((values - points[..., None]) * scales[..., None] + offsets[..., None])
    assert at == memory.shape[1]
    return torch.cat(found, dim=2).flatten(0, 1)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_what_is_packed_is_the_matrix_to_the_last_bit(variant, name, n, k):
    kernels, matrix = kernel_set(variant), stored_matrix(name, n, k)
    exact = matrix.dequantised()
    assert torch.equal(read_back(kernels.pack_stored([[matrix]], None))[:n, :k], exact)
    pair = read_back(kernels.pack_stored(halves(matrix), None))[:, :k].view(-1, 2, PANEL // 2, k).transpose(0, 1)
    gate, up = pair.flatten(1, 2)[:, : n // 2]
    assert torch.equal(torch.cat([gate, up]), exact)


def product(rows, matrix, bias=None):
    """In float64, and how far float32 sums may be from it: products of codes, of scales, and of offsets and sums."""
    weight, rows = matrix.dequantised().double(), rows.double()
    exact, magnitude = rows @ weight.T, rows.abs() @ weight.abs().T
    if matrix.zero_points is not None:
        by_points = matrix.over_rows(lambda part: part)
        scales = by_points.scales.float().repeat_interleave(matrix.group_size, dim=1)[:, : weight.shape[1]].abs()
        magnitude = magnitude + 2 * 15 * (rows.abs() @ scales.double().T)
    if matrix.offsets is not None:
        ranges = torch.tensor(matrix.table).abs().max() if matrix.table else 448.0
        scales = matrix._of_columns(matrix._numbers(matrix.scales, matrix.scale_units)).double().abs()
        magnitude = magnitude + 2 * float(ranges) * (rows.abs() @ scales.T)
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    return exact, 1.01 * (weight.shape[1] + 6) * FLOAT32_ROUNDING * magnitude


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_as_exact_as_float32_sums(variant, name, n, k):
    kernels, matrix = kernel_set(variant), stored_matrix(name, n, k)
    for m in (1, 2, 3, 5, 7, 13, ALL_ROWS) if k < 2000 else (1, 7, ALL_ROWS):
        given = operands(n, k, m)
        got = apply_ops(kernels, given, *packed_of(kernels, matrix, given.bias))
        normed = normed_rows(variant, given)

        exact, bound = product(normed, matrix)
        assert_within(got["logits"], exact, bound)
        exact, bound = product(normed, matrix, given.bias)
        assert_within(got["norm_linear"], exact, bound + BF16_ROUNDING * (exact.abs() + bound))

        exact, bound = product(given.x, matrix, given.bias)
        exact, bound = exact + given.residual.double(), bound + 2 * FLOAT32_ROUNDING * (exact.abs() + bound)
        bound = bound + 2 * FLOAT32_ROUNDING * given.residual.double().abs()
        assert_within(got["linear_add_bias"], exact, bound + BF16_ROUNDING * (exact.abs() + bound))

        (gate, up), (gate_bound, up_bound) = (part.chunk(2, dim=1) for part in product(normed, matrix, given.bias))
        silu = gate * torch.sigmoid(gate)
        exact = silu * up
        silu_bound = 1.1 * gate_bound + 8 * FLOAT32_ROUNDING * silu.abs()
        bound = silu_bound * (up.abs() + up_bound) + silu.abs() * up_bound + FLOAT32_ROUNDING * exact.abs()
        assert_within(got["norm_gate_up silu"], exact, bound + BF16_ROUNDING * (exact.abs() + bound))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("n", "k"), [(130, 96), (96, 100), (72, 2112)])
def test_a_row_does_not_depend_on_the_others(variant, name, n, k):
    """Bitwise, for 1 to 70 rows, wherever the row stands, with one, two and three threads."""
    given, matrix = operands(n, k, ALL_ROWS), stored_matrix(name, n, k)
    kernels = kernel_set(variant)
    packed = packed_of(kernels, matrix, given.bias)
    together = apply_ops(kernels, given, *packed)
    norm = Norm(given.norm, EPS)
    best = kernels.greedy(given.x, norm, packed[0], None)[0]
    assert best == together["logits"].argmax(dim=1).tolist()
    counts = (*range(1, 20), 32, 33, 48, 64, 69) if k < 1000 else (1, 2, 3, 4, 5, 16, 17, 31, 69)
    for m in counts:
        start = (7 * m) % (ALL_ROWS - m + 1)
        rows = slice(start, start + m)
        for op, got in apply_ops(kernels, given.rows(rows), *packed).items():
            assert torch.equal(got, together[op][rows]), (op, m)
        assert kernels.greedy(given.x[rows], norm, packed[0], None)[0] == best[rows]
    for threads in (1, 3):
        other = kernel_set(variant, None, threads)
        packed = packed_of(other, matrix, given.bias)
        for m in (1, 2, 33, ALL_ROWS):
            for op, got in apply_ops(other, given.rows(slice(0, m)), *packed).items():
                assert torch.equal(got, together[op][:m]), (op, threads, m)


STACK = (("q4_k", 128), ("six bits", 64), ("q8_0", 70))


@pytest.mark.parametrize("k", [256, 2304])
def test_rows_of_several_forms_have_the_bits_of_each_alone(variant, k):
    """Bitwise, with a bias too, in any batch and with one, two and three threads."""
    matrices = [stored_matrix(name, rows, k) for name, rows in STACK]
    given = operands(sum(rows for _, rows in STACK), k, ALL_ROWS)
    norm = Norm(given.norm, EPS)
    together: dict[str, torch.Tensor] = {}
    for threads in (2, 1, 3):
        kernels = kernel_set(variant, None, threads)
        stacked = kernels.pack_stored([matrices], given.bias)
        assert stacked.args.kind == 7
        biases = given.bias.split([rows for _, rows in STACK])
        alone = [kernels.pack_stored([[each]], bias) for each, bias in zip(matrices, biases, strict=True)]
        for m in (ALL_ROWS, 1, 2, 5, 17) if threads == 2 else (1, 17):
            x, residual = given.x[:m], given.residual[:m]
            got = {
                "norm_linear": kernels.norm_linear(x, norm, stacked),
                "linear_add": kernels.linear_add(x, stacked, residual.clone()),
                "wide": kernels.linear(x, stacked, True),
            }
            assert torch.equal(got["norm_linear"], torch.cat([kernels.norm_linear(x, norm, w) for w in alone], dim=1))
            assert torch.equal(got["wide"], torch.cat([kernels.linear(x, w, True) for w in alone], dim=1))
            assert kernels.greedy(x, None, stacked)[0] == got["wide"].argmax(dim=1).tolist()
            together = together or got
            for op, values in got.items():
                assert torch.equal(values, together[op][:m]), (op, threads, m)


@pytest.mark.parametrize("name", [name for name in FORMS if stored_matrix(name, 2, 32).zero_points is None])
@pytest.mark.parametrize(("n", "k"), [(130, 96), (72, 2112)])
def test_rows_are_looked_up_as_their_numbers(variant, name, n, k):
    kernels, matrix = kernel_set(variant), stored_matrix(name, n, k)
    packed, exact = kernels.pack_stored([[matrix]], None), matrix.dequantised().bfloat16()
    for ids in (torch.arange(n), torch.tensor([n - 1, 0, 65]), torch.tensor([7]), torch.tensor([], dtype=torch.int64)):
        assert torch.equal(kernels.embed_stored(packed, ids), exact[ids])


def test_rows_that_there_are_not_are_refused(variant):
    kernels = kernel_set(variant)
    packed = kernels.pack_stored([[stored_matrix("q4_k", 64, 256)]], None)
    for ids in (torch.tensor([64]), torch.tensor([-1]), torch.tensor([1], dtype=torch.int32), torch.zeros(1, 1).long()):
        with pytest.raises(ValueError, match="ids must be"):
            kernels.embed_stored(packed, ids)
    for wrong in (stored_matrix("awq", 64, 256), None):
        weight = kernels.pack_linear(torch.ones(64, 32).bfloat16(), None)
        weight = weight if wrong is None else kernels.pack_stored([[wrong]], None)
        with pytest.raises(ValueError, match="without zero points"):
            kernels.embed_stored(weight, torch.tensor([0]))


def test_rows_that_share_a_panel_get_a_form_in_common(variant):
    kernels = kernel_set(variant)
    matrices = [stored_matrix(name, rows, 256) for name, rows in (("q4_k", 33), ("six bits", 40), ("q8_0", 64))]
    packed = kernels.pack_stored([matrices], None)
    assert packed.args.kind == 4
    exact = torch.cat([each.dequantised() for each in matrices])
    assert torch.equal(kernels.linear(torch.eye(256).bfloat16(), packed, True).T, exact)
    pair = kernels.pack_stored([[stored_matrix("q4_1", 64, 256)], [stored_matrix("six bits", 64, 256)]], None)
    assert pair.gate_up
    assert pair.args.kind == 6


@pytest.mark.parametrize("name", FORMS)
def test_a_row_of_nan_stays_alone(variant, name):
    kernels, matrix, given = kernel_set(variant), stored_matrix(name, 130, 96), operands(130, 96, 40)
    packed = packed_of(kernels, matrix, given.bias)
    clean = apply_ops(kernels, given, *packed)
    given.x[17] = torch.nan
    kept = [row for row in range(40) if row != 17]
    for op, got in apply_ops(kernels, given, *packed).items():
        assert not torch.isfinite(got[17]).any(), op
        assert torch.equal(got[kept], clean[op][kept]), op


def test_every_code_has_its_value(variant):
    """All 256 bytes and all scales that fp16 has, the least ones too, through a product by one."""
    kernels = kernel_set(variant)
    bits = torch.arange(256).to(torch.uint8)
    codes = torch.where((bits & 0x7F) == 0x7F, 0, bits).view(8, 32)
    one_hot = torch.eye(32).bfloat16()
    scales = torch.tensor([1.0, 2.0**-24, 2.0**-14, 3 * 2.0**-20, 65504.0, 0.1, -2.0, 0.0]).half()[:, None]
    for name in ("fp8", "q8_0"):
        form = stored_matrix(name, 8, 32)
        matrix = type(form)(kind=form.kind, codes=codes, group_size=32, scales=scales)
        for rows in (one_hot, one_hot[:3]):
            got = kernels.linear(rows, kernels.pack_stored([[matrix]], None), True)
            assert torch.equal(got, matrix.dequantised().T[: len(rows)]), name

"""Packed matrices as plain memory: restored they are the same, what cannot be one is refused, and versions are kept."""

from __future__ import annotations

import ctypes
import hashlib

import pytest
import torch

from quire_kernels.cpu.choice import load_chosen
from quire_kernels.cpu.packing import PACKING_VERSION
from quire_kernels.cpu.variants import usable_variants
from support.cpu_linear import KINDS, SHAPES, apply_ops, kernel_set, operands
from support.cpu_stored import FORMS, stored_matrix

VARIANTS = [variant.name for variant in usable_variants()]
BEST = VARIANTS[0]


def allocate(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def matrices(kernels, given):
    """The same three through the packer of the form: plain, with a bias, gate and up."""
    linear, gate_up = kernels.packed_form.packer(allocate)
    return linear(given.weight, None), linear(given.weight, given.bias), gate_up(*given.halves, given.bias)


def copied(parts):
    """As uint8 and somewhere else, as another process has them."""
    return {name: tensor.clone().view(torch.uint8) for name, tensor in parts.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_what_is_restored_computes_the_same_bits(kind, n, k):
    kernels, given = kernel_set(BEST, kind), operands(n, k, 3)
    form, packed = kernels.packed_form, matrices(kernels, given)
    restored = [form.restore(form.facts(each), copied(form.parts(each))) for each in packed]
    expected, got = apply_ops(kernels, given, *packed), apply_ops(kernels, given, *restored)
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert [form.facts(each) for each in restored] == [form.facts(each) for each in packed]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_matrix_takes_no_more_than_was_said(kind, n, k):
    form = kernel_set(BEST, kind).packed_form
    for each in matrices(kernel_set(BEST, kind), operands(n, k, 1)):
        assert sum(-(-tensor.nbytes // 64) * 64 for tensor in form.parts(each).values()) <= form.most_bytes(n, k)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_no_packed_matrix_is_refused(kind):
    kernels = kernel_set(BEST, kind)
    form, (_, packed, _) = kernels.packed_form, matrices(kernels, operands(200, 1024, 1))
    facts = form.facts(packed)

    def refused(facts, **changes):
        parts = {
            name: tensor for name, tensor in {**copied(form.parts(packed)), **changes}.items() if tensor is not None
        }
        with pytest.raises(ValueError):
            form.restore(facts, parts)

    starts = form.parts(packed)["starts"]
    for wrong in (starts + 64, starts.flip(0), starts + torch.arange(len(starts)), starts[:-1].clone()):
        refused(facts, starts=wrong.view(torch.uint8))
    refused(facts, starts=None)
    refused(facts, packed=copied(form.parts(packed))["packed"][:-64])
    refused(facts, bias=allocate(4))
    refused(facts, more=allocate(64))
    refused({**facts, "n": facts["n"] + 64})
    refused({**facts, "n": -1})
    refused({**facts, "columns": 1 << 20})
    refused({**facts, "gate_up": 2})
    form.restore(facts, copied(form.parts(packed)))


def stored_matrices(name, n, k):
    """Of one form of others, plain and as gate and up, with biases: the form of packed matrices, and they."""
    kernels, matrix = kernel_set(BEST), stored_matrix(name, n, k)
    form, bias = kernels.packed_form, torch.linspace(-1, 1, n).bfloat16()
    pack = form.stored_packer(allocate)
    halves = [[matrix.over_rows(lambda part, rows=rows: part[rows])] for rows in (slice(n // 2), slice(n // 2, n))]
    return form, pack([[matrix]], None), pack([[matrix]], bias), pack(halves, bias)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_what_others_quantised_is_restored_too(name, n, k):
    form, *packed = stored_matrices(name, n, k)
    restored = [form.restore(form.facts(each), copied(form.parts(each))) for each in packed]
    kernels, given = kernel_set(BEST), operands(n, k, 3)
    expected, got = apply_ops(kernels, given, *packed), apply_ops(kernels, given, *restored)
    assert all(torch.equal(expected[op], got[op]) for op in expected)
    for each in packed:
        assert sum(-(-tensor.nbytes // 64) * 64 for tensor in form.parts(each).values()) <= form.most_bytes(n, k)


def stacked_matrix(bias):
    """Rows of three forms, and the form of packed matrices."""
    kernels = kernel_set(BEST)
    rows = [stored_matrix(name, n, 512) for name, n in (("q4_k", 128), ("six bits", 64), ("q8_0", 70))]
    return kernels.packed_form, kernels.packed_form.stored_packer(allocate)([rows], bias)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 262).bfloat16()])
def test_rows_of_several_forms_are_restored_too(bias):
    form, packed = stacked_matrix(bias)
    restored = form.restore(form.facts(packed), copied(form.parts(packed)))
    kernels, x = kernel_set(BEST), operands(262, 512, 3).x
    assert torch.equal(kernels.linear(x, restored, True), kernels.linear(x, packed, True))
    assert form.facts(restored) == form.facts(packed)
    assert sum(-(-tensor.nbytes // 64) * 64 for tensor in form.parts(packed).values()) <= form.most_bytes(262, 512)


def test_memory_that_is_no_stack_is_refused():
    form, packed = stacked_matrix(None)
    facts, parts = form.facts(packed), copied(form.parts(packed))
    wrong_facts = (
        *({"num_parts": count} for count in (0, 1, 2, 5)),
        *({name: value} for name in ("0.kind", "1.kind") for value in (0, 2, 7)),
        {"n": 261},
        {"0.n": 192},
        {"0.n": 100, "2.n": 98},
        {"1.columns": 256},
        {"columns": 256},
        {"gate_up": 1},
        {"2.gate_up": 1},
        {"0.group": 64},
    )
    for wrong in wrong_facts:
        with pytest.raises(ValueError):
            form.restore(facts | wrong, parts)
    for changed in (
        {name: part for name, part in parts.items() if name != "1.starts"},
        parts | {"bias": allocate(256)},
        parts | {"1.bias": allocate(256)},
        parts | {"3.packed": allocate(64)},
        parts | {"1.packed": parts["1.packed"][:-64].clone()},
    ):
        with pytest.raises(ValueError):
            form.restore(facts, changed)


@pytest.mark.parametrize("name", ["awq", "q4_k", "q6_k", "fp8"])
def test_memory_that_is_no_matrix_of_others_is_refused(name):
    form, packed, *_ = stored_matrices(name, 130, 512)
    facts, parts = form.facts(packed), copied(form.parts(packed))
    form.restore(facts, parts)
    group = facts["group"]
    for wrong in (
        {"kind": 7},
        {"kind": 1},
        {"group": 0},
        {"group": -group},
        {"group": 24},
        {"group": 64 if group != 64 else 32},
        {"scale_form": 4},
        {"scale_form": -1},
        {"offset_form": 6},
        {"columns": 1024},
        {"n": 65},
    ):
        with pytest.raises(ValueError):
            form.restore(facts | wrong, parts)
    changed = parts | {"table": parts["table"][:32]} if "table" in parts else parts | {"table": allocate(64)}
    with pytest.raises(ValueError):
        form.restore(facts, changed)


STORED_DIGESTS = {
    (1, "awq"): "2ebed1b154f5635a",
    (1, "q4_k"): "f13a226b1ca0464d",
    (1, "q6_k"): "4e2db2aa9dbec808",
    (1, "fp8"): "eeadb8db57fc46a5",
    (1, "six bits"): "92f3406c8d7c6f1d",
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [name for _, name in STORED_DIGESTS])
def test_the_version_changes_with_what_others_quantised(variant, name):
    def numbers(shape, least, count):
        return least + torch.arange(shape[0] * shape[1]).view(shape) * 7919 % 2003 % count

    made = stored_matrix(name, 130, 512)
    steps = {"scales": 1e-3, "scale_units": 1e-4, "offset_units": -1e-4}
    codes = {"nibbles": 16, "six_bits": 31}.get(made.kind, 120)
    counts = {"codes": codes, "scales": 63, "offsets": 63, "zero_points": 15}

    def of_formula(part):
        like = getattr(made, part)
        values = numbers(like.shape, 1, counts.get(part, 50))
        return (values * steps.get(part, 1) if like.is_floating_point() else values - 1).to(like.dtype)

    form = kernel_set(variant).packed_form
    packed = form.stored_packer(allocate)([[made.with_parts(of_formula)]], None)
    digest = hashlib.sha256()
    for _, part in sorted(form.parts(packed).items()):
        digest.update(part.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == STORED_DIGESTS[PACKING_VERSION, name]


# Of packed memory. A change of these without a change of PACKING_VERSION would take files of another layout for ours.
DIGESTS = {
    (1, None): "f0cbfa6e80951dd2",
    (1, "int8"): "1e2ea5937dde0728",
    (1, "int4"): "c75a971f3c7b82f5",
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_version_changes_with_what_is_packed(variant, kind):
    """Values of a formula, not of a generator: the same wherever this runs."""
    values = (torch.arange(130 * 1024) * 7919 % 2003 - 1001).float() / 1001
    weight = (values**3).view(130, 1024).bfloat16()
    digest = hashlib.sha256()
    form = kernel_set(variant, kind).packed_form
    linear, _ = form.packer(allocate)
    for _, part in sorted(form.parts(linear(weight, weight[:, 0])).items()):
        digest.update(part.view(torch.uint8).numpy().tobytes())
    assert form.name == f"{PACKING_VERSION} {variant} {kind or 'bf16'}"
    assert digest.hexdigest()[:16] == DIGESTS[PACKING_VERSION, kind]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 1, 524_287, 524_288, 1_300_000, -1])
def test_one_value_that_is_not_finite_is_found(value, at):
    form = kernel_set(BEST).packed_form
    matrix = torch.full((1301, 1000), 3.3e38).bfloat16()  # almost infinite
    assert form.all_finite(matrix)
    matrix.view(-1)[at] = value
    assert not form.all_finite(matrix)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_checksums_are_those_of_the_specification(text, expected):
    got = load_chosen().library.quire_checksum(ctypes.c_char_p(text), len(text))
    assert got % 2**64 == expected


def test_every_bit_counts():
    data = bytearray(range(256)) * 5 + bytearray(b"tail of it")
    checksum = load_chosen().library.quire_checksum
    seen = set()
    for at in range(0, len(data), 7):
        data[at] ^= 1
        seen.add(checksum((ctypes.c_char * len(data)).from_buffer(data), len(data)))
        data[at] ^= 1
    assert len(seen) == len(range(0, len(data), 7))

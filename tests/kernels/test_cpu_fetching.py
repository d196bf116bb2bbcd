"""Where the C++ kernels fetch what they read once: chosen by the CPU's maker, and never seen in a result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire_kernels.cpu import context, variants
from quire_kernels.cpu.context import FETCHES, fetch_for, fetch_text
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.cpu.variants import usable_variants
from quire_kernels.kernel_set import Addend, Fetch, Norm
from quire_kernels.low_rank import LowRankMatrix, LowRankPart
from support.cpu_attention import KV_TYPES, Kernels, Sequences, shape_of
from support.cpu_linear import EPS, KINDS, apply_ops, kernel_set, operands
from support.cpu_stored import FORMS, stored_matrix
from support.experts import packed, random_block

N, K = 200, 1024  # several panels, each longer than what is fetched ahead
ROWS = (1, 2, 7, 40)  # one tile, few and many
Run = Callable[[], list[torch.Tensor]]


@pytest.fixture(params=[variant.name for variant in usable_variants()])
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize(
    ("vendor", "fetch"),
    [
        ("GenuineIntel", "second level"),
        ("AuthenticAMD", "past caches"),
        ("HygonGenuine", "past caches"),
        ("CentaurHauls", "second level"),
        ("  Shanghai  ", "second level"),
        ("", "past caches"),  # ARM
    ],
)
def test_the_maker_chooses(vendor: str, fetch: Fetch) -> None:
    assert fetch_for(vendor) == fetch


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu\n", "GenuineIntel"),
        ("vendor_id\t:   Shanghai  \nflags\t\t: fpu\n", "Shanghai"),
        ("processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n", ""),
    ],
)
def test_the_maker_is_found(text: str, vendor: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(variants, "Path", lambda _: tmp_path / "cpuinfo")
    assert variants.cpu_vendor.__wrapped__() == vendor


@pytest.mark.parametrize(("vendor", "number"), [("GenuineIntel", 1), ("AuthenticAMD", 0)])
def test_a_context_is_made_for_its_cpu(vendor: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def __init__(self) -> None:
            self.told: list[int] = []

        def quire_create(self, threads: int, cpus: object) -> int:
            return 1

        def quire_destroy(self, handle: int) -> None: ...

        def quire_fetch(self, handle: int, fetch: int) -> None:
            self.told.append(fetch)

    library = Library()
    monkeypatch.setattr(context, "cpu_vendor", lambda: vendor)
    made = context.Context(library, 1)
    for fetch in FETCHES:
        made.fetch(fetch)
    assert library.told == [number, 0, 1]


def test_operators_are_told() -> None:
    told = cpu_kernel_set(1).why_variant
    vendor = variants.cpu_vendor()
    assert told.endswith(fetch_text(fetch_for(vendor), vendor))
    expected = "fetches weights to the second-level cache, as for GenuineIntel"
    assert fetch_text("second level", "GenuineIntel") == expected


def same_with_both(choose: Callable[[Fetch], None] | None, run: Run) -> None:
    assert choose is not None
    found = []
    for fetch in FETCHES:
        choose(fetch)
        found.append(run())
    choose(fetch_for(variants.cpu_vendor()))
    first, *others = found
    for other in others:
        assert all(torch.equal(one, same) for one, same in zip(first, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_same_bits(variant: str, kind: str | None) -> None:
    kernels = kernel_set(variant, kind)
    given = operands(N, K, max(ROWS))
    plain, biased = kernels.pack_linear(given.weight, None), kernels.pack_linear(given.weight, given.bias)
    gate_up = kernels.pack_gate_up(*given.halves, given.bias)
    for rows in ROWS:
        part = given.rows(slice(rows))
        same_with_both(kernels.fetch, lambda p=part: [*apply_ops(kernels, p, plain, biased, gate_up).values()])


@pytest.mark.parametrize("form", FORMS)
def test_stored_kinds_have_the_same_bits(variant: str, form: str) -> None:
    kernels, given = kernel_set(variant), operands(N, K, max(ROWS))
    weight = kernels.pack_stored([[stored_matrix(form, N, K)]], None)
    for rows in ROWS:
        same_with_both(kernels.fetch, lambda r=rows: [kernels.norm_linear(given.x[:r], Norm(given.norm, EPS), weight)])


@pytest.mark.parametrize("kind", KINDS)
def test_experts_have_the_same_bits(variant: str, kind: str | None) -> None:
    kernels = kernel_set(variant, kind)
    routing, experts = packed(kernels, random_block(5, 256, 96, biases=False), top_k=2)
    x = torch.randn(37, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
    same_with_both(
        kernels.fetch, lambda: [kernels.mix_experts(x[:r], None, routing, experts, 1.0, None) for r in ROWS[:3]]
    )


def test_adapters_have_the_same_bits(variant: str) -> None:
    kernels, given = kernel_set(variant), operands(N, K, 21)
    assert kernels.adapted is not None
    generator = torch.Generator().manual_seed(1)
    shrink, expand = torch.randn(24, K, generator=generator) / K**0.5, torch.randn(N, 24, generator=generator)
    part = LowRankPart(first_row=0, shrink=shrink.bfloat16(), expand=expand.bfloat16(), scale=0.5)
    matrix = kernels.adapted.pack(LowRankMatrix(num_rows=N, num_inputs=K, gate_up=False, parts=(part,)))
    slots = torch.tensor([0, -1, 0] * 7, dtype=torch.int32)
    added = Addend(slots=slots, matrices=(matrix,))
    plain = kernels.pack_linear(given.weight, None)
    ops = kernels.adapted
    same_with_both(kernels.fetch, lambda: [ops.norm_linear(given.x, Norm(given.norm, EPS), plain, added)])


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_attention_has_the_same_bits(variant: str, kv_type: str) -> None:
    found = next(each for each in usable_variants() if each.name == variant)
    kernels = Kernels(found, threads=2, kv_type=kv_type)
    sequences = Sequences((200, 70), shape_of(4, 2, 64))
    slices = [(0, 199, 1), (1, 30, 40)]
    same_with_both(kernels.context.fetch, lambda: sequences.attend(kernels, slices))

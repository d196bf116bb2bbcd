"""More workers than a layer has panels or heads: the work is dealt over rows too, and no bit depends on by how many."""

import pytest
import torch

from quire_kernels.cpu.variants import usable_variants
from quire_kernels.kernel_set import Norm
from support.cpu_attention import KV_TYPES, Kernels, Sequences, shape_of
from support.cpu_linear import EPS, KINDS, apply_ops, kernel_set, operands

MANY = 16
EVERY, SOME = (*range(1, 71), 300), (1, 2, 6, 7, 12, 13, 31, 48, 49, 70, 300)


@pytest.fixture(scope="module", params=[variant.name for variant in usable_variants()])
def variant(request):
    return request.param


# One panel, three, the sixteen of a small model's hidden size, and more columns than a cached slice holds.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(64, 64), (130, 100), (1024, 64), (72, 8352)])
def test_products_of_many_workers_equal_those_of_one(variant, kind, n, k):
    given = operands(n, k, EVERY[-1])
    weight, bias = given.weight, given.bias
    packed, kernels = [], [kernel_set(variant, kind, threads) for threads in (1, MANY)]
    for each in kernels:
        packed.append(
            (each.pack_linear(weight, None), each.pack_linear(weight, bias), each.pack_gate_up(*given.halves, bias))
        )
    for m in EVERY if (n, k) == (130, 100) else SOME:
        few = given.rows(slice(0, m))
        alone, together = (apply_ops(each, few, *w) for each, w in zip(kernels, packed, strict=True))
        for name, rows in together.items():
            assert torch.equal(rows, alone[name]), (name, m)
        for each, w in zip(kernels, packed, strict=True):
            columns, _ = each.greedy(few.x, Norm(given.norm, EPS), w[0])
            assert columns == alone["logits"].argmax(dim=1).tolist(), m


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("heads", [(4, 2), (8, 1)], ids=str)
def test_attention_of_many_workers_equals_that_of_one(variant, heads, kv_type):
    chosen = next(each for each in usable_variants() if each.name == variant)
    one, many = (Kernels(chosen, threads=threads, kv_type=kv_type) for threads in (1, MANY))
    sequences = Sequences([300, 70, 1100, 1], shape_of(*heads, 32))
    for slices in ([(0, 0, 300)], [(1, 0, 70)], [(2, 700, 400)], [(2, 1099, 1)], [(0, 299, 1), (1, 3, 60), (3, 0, 1)]):
        alone, together = (sequences.attend(each, slices) for each in (one, many))
        for row, expected in zip(together, alone, strict=True):
            assert torch.equal(row, expected), slices

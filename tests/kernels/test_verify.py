"""The checks of kernel sets: sets that are right pass, and a set with one wrong op fails at that op."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch

from quire_kernels.kernel_set import KVFormat, NormLinear
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.linear import Linear
from quire_kernels.select import select
from quire_kernels.stored import StoredKind
from quire_kernels.verify.checks import (
    ModelSizes,
    attention_checks,
    linear_checks,
    other_heads,
    short_checks,
)
from quire_kernels.verify.experts import ExpertSizes, RoutingForm
from quire_kernels.verify.findings import Check, Outcome, Subject, close
from quire_kernels.verify.heads import Heads
from quire_kernels.verify.repair import Irreplaceable, without
from quire_kernels.verify.stored import StoredChecks
from quire_kernels.verify.watch import run_checks
from support.covering import few

CPU = torch.device("cpu")
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=32, block_size=16)
SIZES = ModelSizes(hidden=64, inner=96, heads=HEADS, vocabulary=200)


def subject(kernels=REFERENCE, *, dtype=torch.bfloat16, alone=True, **options) -> Subject:
    return Subject(kernels=kernels, device=CPU, dtype=dtype, alone=alone, **options)


def cpu_set(quantization=None, kv_type="auto"):
    return select(
        CPU,
        torch.bfloat16,
        "cpu",
        kv=KVFormat(head_dim=32, block_size=16, kv_type=kv_type),
        quantization=quantization,
        threads=2,
    )


def failures(checks, **options):
    return [each for each in run_checks(checks, device=CPU, **options) if not each.ok]


def failed_ops(kernels, **options) -> set[str]:
    return {each.op for each in failures(short_checks(subject(kernels, **options), SIZES))}


@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float16, torch.float32], torch.bfloat16, torch.float32))
def test_the_reference_passes_in_every_type(dtype):
    assert not failures(linear_checks(subject(dtype=dtype), SIZES))
    assert not failures(attention_checks(subject(dtype=dtype), HEADS, own=True))


@pytest.mark.parametrize("heads", other_heads(), ids=str)
def test_the_reference_passes_with_other_heads(heads):
    assert not failures(attention_checks(subject(), heads, own=False))


@pytest.mark.parametrize(("quantization", "kv_type"), [(None, "auto"), ("int8", "int8"), ("int4", "auto")])
def test_the_cpu_kernels_pass_in_every_format(quantization, kv_type):
    kernels = cpu_set(quantization, kv_type)
    mine = subject(kernels, quantization=quantization, kv_type=kv_type)
    assert not failures(linear_checks(mine, SIZES))
    for heads in (HEADS,) if quantization == "int4" else (HEADS, *other_heads()):  # int4 has the pool of None
        assert not failures(attention_checks(mine, heads, own=heads is HEADS))


def changed(op, change):
    """The reference with one op whose result, or whose arguments, something happens to."""
    return replace(REFERENCE, **{op: change(getattr(REFERENCE, op))})


def spoiled(x, index, value=torch.nan):
    x[index] = value
    return x


def interleaved(right):
    """Pairs are neighbours instead of halves."""

    def rope_write(qkv, rope, shape, *rest):
        width = shape.head_dim
        order = torch.arange(width).view(-1, 2).T.flatten()
        q = right(qkv.view(len(qkv), -1, width)[..., order].flatten(1), rope, shape, *rest)
        return q[..., order.argsort()]

    return rope_write


def into_block_0(right):
    def rope_write(qkv, rope, shape, kv, *rest):
        q = right(qkv, rope, shape, kv, *rest)
        kv[0] = 0
        return q

    return rope_write


def keys_unrotated(right):
    """K of the position before."""

    def rope_write(qkv, *rest):
        q, step = right(qkv, *rest), rest[-1]
        moved = replace(step, positions=(step.positions - 1).clamp(min=0))
        right(qkv, *rest[:-1], moved)
        return q

    return rope_write


def further(right):
    """A position more than there is."""

    def attention(q, shape, kv, layer, step):
        longer = tuple(length + 1 for length in step.kv_lens)
        return right(q, shape, kv, layer, replace(step, kv_lens=longer, positions=step.positions + 1))

    return attention


def not_invariant(right):
    """The last bit of one number depends on the number of rows: within every tolerance."""

    def norm_linear(x, norm, w):
        out = right(x, norm, w)
        if len(x) > 4:
            out.view(torch.int16)[0, 0] ^= 1
        return out

    return norm_linear


WRONG = {
    "embed": [lambda right: lambda table, ids: right(table, ids - 1)],
    "norm_linear": [
        lambda right: lambda x, norm, w: right(x, norm, Linear(w.weight, None)),
        lambda right: lambda x, norm, w: right(x, norm._replace(weight=norm.weight.roll(1)), w),
        lambda right: lambda x, norm, w: right(x * 1.04, norm, w) * 1.04,
        lambda right: lambda x, norm, w: spoiled(right(x, norm, w), (-1, -1)),
        lambda right: lambda x, norm, w: spoiled(right(x, norm, w), slice(6, None), 0.0),
        lambda right: lambda x, norm, w: right(x, norm, w).float(),
        not_invariant,
    ],
    "norm_gate_up": [
        lambda right: (
            lambda x, norm, w, *kind: right(x, norm, Linear(w.weight.roll(len(w.weight) // 2, 0), w.bias), *kind)
        ),
        lambda right: lambda x, *rest: right(x.nan_to_num(), *rest),
        lambda right: lambda x, norm, w, _: right(x, norm, w, "silu"),
    ],
    "linear_add": [
        lambda right: lambda x, w, residual, scale: right(x, w, torch.zeros_like(residual), scale),
        lambda right: lambda x, *rest: right(spoiled(x.clone(), (slice(None), -1), 0.0), *rest),
        lambda right: lambda x, w, residual, _: right(x, w, residual, 1.0),
    ],
    "norm_add": [
        lambda right: lambda y, norm, residual: right(y, norm, torch.zeros_like(residual)),
        lambda right: lambda y, norm, residual: right(y, norm._replace(weight=norm.weight * 1.04), residual),
    ],
    "mul_sigmoid": [
        lambda right: lambda x, gate: right(gate, x),
        lambda right: lambda x, gate: right(x, gate * 1.1),
    ],
    "logits": [
        lambda right: lambda x, norm, w: right(x, norm, w).roll(1, 1),
        lambda right: lambda x, norm, w: right(x, norm, w).bfloat16(),
    ],
    "rope_write": [interleaved, into_block_0, keys_unrotated],
    "attention": [
        further,
        lambda right: lambda q, shape, *rest: right(q, replace(shape, scale=shape.scale * 1.1), *rest),
        lambda right: lambda q, shape, kv, layer, step: right(q, shape, kv, 0, step),
        lambda right: lambda q, *rest: right(q, *rest) * 1.02,
        lambda right: lambda q, *rest: spoiled(right(q, *rest), -1),
    ],
    "new_kv": [lambda right: lambda *sizes: right(*sizes) + 1],
    "kv_block_bytes": [lambda right: lambda *sizes: right(*sizes) + 64],
}
FAULTS = [(op, number) for op, changes in WRONG.items() for number in range(len(changes))]


@pytest.mark.parametrize(("op", "number"), FAULTS)
def test_a_wrong_op_is_found_and_no_other_is_blamed(op, number):
    blamed = "new_kv" if op == "kv_block_bytes" else op
    found = failed_ops(changed(op, WRONG[op][number]))
    if op == "norm_linear":  # it multiplies stored matrices, too
        found -= {"pack_stored"}
    assert found == {blamed}


EXPERTS = {
    "mix_experts": [
        lambda right: lambda x, norm, routing, *rest: right(x, norm, replace(routing, normalised=False), *rest),
        lambda right: lambda x, norm, routing, *rest: right(x, norm, replace(routing, top_k=1), *rest),
        lambda right: lambda x, norm, *rest: right(x, None, *rest),
        lambda right: lambda *rest: right(*rest) * 1.1,
        lambda right: lambda x, *rest: spoiled(right(x, *rest), slice(6, None), 0.0),
    ],
    "route": [
        lambda right: lambda x, routing, count: right(x, replace(routing, scale=2.0), count),
        lambda right: lambda x, routing, count: right(-x, routing, count),
    ],
    "gate_rows": [
        lambda right: lambda x, norm, w, wide: right(-x, norm, w, wide),
        lambda right: lambda x, *rest: spoiled(right(x, *rest), (-1, -1)),
    ],
    "given_experts": [
        lambda right: lambda x, index, weights, experts: right(x, index.flip(1), weights, experts),
        lambda right: lambda x, index, weights, experts: right(x, index, weights, replace(experts, activation="silu")),
        lambda right: lambda x, index, *rest: right(x, (index + 1) % 6, *rest),
        lambda right: lambda x, *rest: spoiled(right(x, *rest), (-1, -1)),
    ],
}


@pytest.mark.parametrize("op", EXPERTS)
def test_wrong_experts_are_found(op):
    experts = ExpertSizes(count=6, top_k=3, hidden=64, inner=40, activation="swiglu_clamped", biases=True)
    sizes = replace(SIZES, experts=experts)
    assert not failures(short_checks(subject(), sizes))
    for change in EXPERTS[op]:
        assert {each.op for each in failures(short_checks(subject(changed(op, change)), sizes))} == {op}


# A form of routing, and what a set may get wrong of it.
ROUTED = [
    ({"scoring": "sigmoid"}, {"scoring": "softmax"}),
    ({"scoring": "sigmoid", "biased": True}, {"selection_bias": None}),
    ({"scoring": "sigmoid", "groups": 4, "kept_groups": 2}, {"groups": 1, "kept_groups": 1}),
    ({"scoring": "sigmoid", "groups": 4, "kept_groups": 2}, {"best_of_group": 1}),
    ({"scaled": True}, {"expert_scales": None}),
    ({"scaled": True}, {"scale": 1.0}),
    ({"own_norm": True}, {"norm": None}),
]


@pytest.mark.parametrize(("form", "wrong"), ROUTED)
def test_a_wrong_routing_is_found(form, wrong):
    experts = ExpertSizes(count=32, top_k=3, hidden=64, inner=40, form=RoutingForm(**form))
    sizes = replace(SIZES, experts=experts)
    assert not failures(short_checks(subject(), sizes))

    def mixing(right):
        return lambda x, norm, routing, *rest: right(x, norm, replace(routing, **wrong), *rest)

    assert {each.op for each in failures(short_checks(subject(changed("mix_experts", mixing)), sizes))} == {
        "mix_experts"
    }


@pytest.mark.parametrize("kind", get_args(StoredKind))
def test_a_wrong_product_of_one_stored_kind_is_found_and_decoded(kind):
    right = cpu_set(None, "auto")

    def pack(matrices, bias):
        changed = [
            [one if one.kind != kind else replace(one, scales=one.scales.flip(0)) for one in each] for each in matrices
        ]
        return right.pack_stored(changed, bias)

    wrong = replace(right, pack_stored=pack)
    found = failures(StoredChecks(subject(wrong), (1, 7)).checks())
    assert {each.op for each in found} == {"pack_stored"}
    assert all(each.case.startswith(kind.replace("_", " ")) for each in found)
    mended = without(wrong, ["pack_stored"], reference_pool=False, deterministic=True)
    lacking = {"pack_stored": None, "embed_stored": None, "stored_bits": None, "stored_experts": False}
    assert mended == replace(right, **lacking)
    assert not list(StoredChecks(subject(mended), (1, 7)).checks())


def test_wrong_rows_of_a_stored_embedding_are_found():
    right = cpu_set(None, "auto")
    wrong = replace(right, embed_stored=lambda w, ids: right.embed_stored(w, (ids + 1) % 130))
    assert {each.op for each in failures(StoredChecks(subject(wrong), (1, 7)).checks())} == {"pack_stored"}


def test_an_attention_that_forgets_the_window_is_found():
    windowed = replace(HEADS, window=20)
    wrong = changed("attention", lambda right: lambda q, shape, *rest: right(q, replace(shape, window=None), *rest))
    assert {each.op for each in failures(attention_checks(subject(wrong), windowed, own=False))} == {"attention"}


def greedy_of(ids, *, forgets_bits=False):
    def greedy(x, norm, w, allowed):
        logits = REFERENCE.logits(x, norm, w)
        finite = logits.isfinite().all(dim=1).tolist()
        if allowed is not None and not forgets_bits:
            bits = np.unpackbits(allowed.numpy().view(np.uint8), axis=1, bitorder="little", count=logits.shape[1])
            logits = logits.masked_fill(torch.from_numpy(bits == 0), -torch.inf)
        return ids(logits), finite

    return greedy


def test_faster_ops_are_held_to_those_they_stand_for():
    right = replace(REFERENCE, greedy=greedy_of(lambda logits: logits.argmax(dim=1).tolist()))
    assert not failed_ops(right)
    assert failed_ops(replace(right, greedy=greedy_of(lambda logits: logits.argmin(dim=1).tolist()))) == {"greedy"}
    forgetting = greedy_of(lambda logits: logits.argmax(dim=1).tolist(), forgets_bits=True)
    assert failed_ops(replace(right, greedy=forgetting)) == {"greedy"}
    kernels = cpu_set()
    assert not failed_ops(kernels)

    def bind(program):
        second = [place for place, op in enumerate(program) if isinstance(op, NormLinear)][1]
        return kernels.bind_layers([*program[second:], *program[:second]])

    assert failed_ops(replace(kernels, bind_layers=bind)) == {"bind_layers"}


def test_what_is_not_promised_is_told_and_no_fault():
    wrong = changed("norm_linear", not_invariant)
    found = list(run_checks(short_checks(subject(wrong, alone=False), SIZES), device=CPU))
    assert all(each.ok for each in found)
    assert {each.op for each in found if each.alone is False} == {"norm_linear", "pack_stored"}
    assert {each.op for each in found if each.alone} == {
        *("norm_gate_up", "linear_add", "norm_add", "mul_sigmoid", "logits", "rope_write", "attention")
    }


def raising(*_):
    raise RuntimeError("no such\nkernel")


def test_an_exception_is_a_failure_of_its_op():
    found = failures(short_checks(subject(replace(REFERENCE, logits=raising)), SIZES))
    assert {each.op for each in found} == {"logits"}
    assert found[0].problem == "raised RuntimeError: no such kernel"
    assert not found[0].fatal
    found = failures(short_checks(subject(replace(REFERENCE, pack_linear=raising)), SIZES))
    assert found[0].op == "pack_linear"


def test_a_hang_ends_the_checks_after_a_time():
    release = threading.Event()

    def hanging(*_):
        release.wait(60)
        return REFERENCE.attention(*_)

    started = time.monotonic()
    checks = attention_checks(subject(replace(REFERENCE, attention=hanging)), HEADS, own=False)
    found = list(run_checks(checks, device=CPU, patience=8.0))
    release.set()
    assert time.monotonic() - started < 50
    assert [(each.op, each.fatal, each.problem) for each in found if not each.ok] == [
        ("attention", True, "did not come back within 8 seconds")
    ]
    assert found[-1].fatal


def test_a_fault_in_a_check_itself_is_no_finding():
    def checks():
        yield Check(op="embed", case="", run=Outcome)
        raise KeyError("ours")

    with pytest.raises(KeyError):
        list(run_checks(checks(), device=CPU))


def test_nothing_is_close_to_nan_and_equal_infinities_are_not_errors():
    one, bound = torch.ones(3), torch.full((3,), 0.5)
    assert close(one, one * 1.4, bound).problem == ""
    assert close(one, one * 1.6, bound).problem
    assert close(torch.tensor([1, torch.nan, 1]), one, bound).problem.startswith(
        "1 of 3 numbers are wrong; at [1] it is nan"
    )
    assert close(torch.tensor([1, torch.inf, 1]), one, bound).problem
    assert close(one[:2], one, bound).problem == "the shape is [2], not [3]"


def test_what_fails_is_replaced_where_the_reference_fits():
    broken = replace(REFERENCE, name="fake", attention=raising, logits=raising, greedy=raising, choose=raising)
    mended = without(broken, ["attention", "logits"], reference_pool=True)
    assert mended == replace(broken, attention=REFERENCE.attention, logits=REFERENCE.logits, greedy=None)
    assert mended.name == "fake"
    copying = replace(REFERENCE, copy_blocks=raising)
    assert failed_ops(copying) == {"copy_blocks"}
    assert without(copying, ["copy_blocks"], reference_pool=True) == REFERENCE
    assert without(broken, ["choose"], reference_pool=False) == replace(broken, choose=None)
    bound = replace(broken, bind_layers=raising)
    assert without(bound, ["embed"], reference_pool=False).bind_layers is raising
    assert without(bound, ["linear_add"], reference_pool=False).bind_layers is None
    chained = replace(broken, bind_decodes=raising)
    assert without(chained, ["embed"], reference_pool=False).bind_decodes is raising
    assert without(chained, ["attention"], reference_pool=True).bind_decodes is None
    keeping = replace(REFERENCE, stored_bits=lambda *_: 4.5)
    assert without(keeping, ["norm_add"], reference_pool=False).stored_bits is not None
    assert without(keeping, ["linear_add"], reference_pool=False).stored_bits is None


@pytest.mark.parametrize(
    ("kernels", "op", "pool", "why"),
    [
        (REFERENCE, "attention", False, "reference attention cannot read this KV pool"),
        (replace(REFERENCE, packed_bits=16.0), "logits", True, "reference products cannot read these weights"),
        (REFERENCE, "new_kv", True, "the reference's would not fit the others"),
        (REFERENCE, "pack_linear", True, "the reference's would not fit the others"),
    ],
)
def test_what_cannot_be_replaced_is_refused(kernels, op, pool, why):
    with pytest.raises(Irreplaceable, match=why):
        without(kernels, [op], reference_pool=pool)


def test_bits_that_were_asked_for_are_not_given_up():
    """On a GPU the reference's rows depend on their batch: it may replace nothing there."""
    with pytest.raises(Irreplaceable, match="would depend on their batch"):
        without(REFERENCE, ["greedy", "logits"], reference_pool=True, deterministic=True)
    mended = without(replace(REFERENCE, choose=raising), ["choose"], reference_pool=True, deterministic=True)
    assert mended == REFERENCE

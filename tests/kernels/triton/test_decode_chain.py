"""The layers of a step of decodes in five launches: their definition, a row's own bits, the order of launches."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from quire_engine.demo import demo_model_path
from quire_kernels.kernel_set import KeepSampled, LinearAdd, Norm, NormGateUp, NormLinear
from quire_kernels.layer_program import run_layers
from quire_kernels.reference import REFERENCE
from quire_kernels.reference.linear import Linear
from quire_kernels.triton import chain_product, decode_attention, decode_chain
from quire_kernels.triton.attention import TritonAttention
from quire_kernels.triton.set import make_triton_set
from support.guarded import DEVICE, guarded
from support.model_steps import Model, scheduled
from support.planted import planted
from support.triton_chain import FAULTS, Sizes, decodes, layers, with_fault

PAGE = 16
AHEAD = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)  # as such a GPU would compute it
SMALL = Sizes(hidden=96, inner=144, heads=4, kv_heads=2, head_dim=32)
WHERE_ONE_LAUNCHES = pytest.mark.skipif(
    "ttsem" in sys.modules or DEVICE.type == "cuda", reason="launches are looked at in the interpreter"
)


class Step:
    """Rows of sequences with random histories in a pool that is NaN elsewhere, and the layers that they pass."""

    def __init__(self, sizes: Sizes, lengths: list[int], dtype: torch.dtype = torch.bfloat16, **shape: Any) -> None:
        self.sizes, self.lengths, self.dtype = sizes, lengths, dtype
        random = torch.Generator().manual_seed(sum(lengths) + sizes.hidden)

        def normal(*size: int) -> torch.Tensor:
            values = torch.randn(size, generator=random)
            return (values / size[1] ** 0.5 if len(size) == 2 else 0.3 * values).to(DEVICE)

        self.program = layers(sizes, 2, normal, dtype)
        if shape:
            self.program = [
                replace(op, shape=replace(op.shape, **shape)) if hasattr(op, "shape") else op for op in self.program
            ]
        self.x = torch.randn(len(lengths), sizes.hidden, generator=random).to(DEVICE, dtype)
        held = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(held), generator=random).int() + 1
        tables = torch.zeros(len(lengths), max(held), dtype=torch.int32)
        for row, blocks in zip(tables, order.split(held), strict=True):
            row[: len(blocks)] = blocks
        last = torch.tensor(lengths) - 1
        slots = tables[torch.arange(len(lengths)), last // PAGE].long() * PAGE + last % PAGE
        self.step = decodes(lengths, tables.to(DEVICE), slots.to(DEVICE), device=DEVICE)
        self.attention = TritonAttention(sizes.kv_type)
        self.pool = self.attention.new_kv(
            sum(held) + 1, 2, sizes.kv_heads, PAGE, sizes.head_dim, dtype, torch.device("cpu")
        )
        if sizes.kv_type == "auto":
            for blocks, length in zip(tables, lengths, strict=True):
                known = torch.randn(-(-length // PAGE) * PAGE, 2, 2, sizes.kv_heads, sizes.head_dim, generator=random)
                known[length - 1 :] = torch.nan
                for index, block in enumerate(blocks[: len(known) // PAGE].tolist()):
                    self.pool[block] = known[index * PAGE : (index + 1) * PAGE].permute(1, 2, 3, 0, 4).to(dtype)
            self.pool[0] = torch.nan
        self.pool = self.pool.to(DEVICE)

    def rows(self, *chosen: int) -> Any:
        """The step of some of the rows."""
        at = torch.tensor(chosen, device=DEVICE)
        lengths = [self.lengths[i] for i in chosen]
        return decodes(lengths, self.step.block_tables[at], self.step.kv_slots[at], device=DEVICE)

    def chained(
        self, step: Any = None, x: torch.Tensor | None = None, module: ModuleType = decode_chain, **options: Any
    ):
        """(the rows after the layers, the pool)."""
        chain = module.bind_decodes(self.attention, self.program, **{"ahead": AHEAD} | options)
        pool = self.pool.clone()
        found = chain(self.x.clone() if x is None else x.clone(), [pool], step or self.step)
        assert found is not None
        return found, pool

    def layered(self, ops: Any, program: Any = None, pool: torch.Tensor | None = None):
        """The same by single ops."""
        program = self.program if program is None else program
        pool = self.pool.clone() if pool is None else pool
        dtype = torch.float32 if pool.dtype == torch.float32 else self.dtype
        return run_layers(ops, program, self.x.clone().to(dtype), [pool], self.step), pool

    def check(self, **options: Any) -> None:
        """Off the exact result by no more than what the same roundings cost the reference, three times."""
        exact, exact_pool = self.layered(REFERENCE, _wide(self.program), self.pool.float())
        rounded, _ = self.layered(REFERENCE)
        with guarded():
            found, pool = self.chained(**options)
        off, allowed = (found.float() - exact).norm(), 3 * (rounded.float() - exact).norm()
        assert off <= allowed, f"{off} of {allowed}"
        written = (pool.float() - self.pool.float()).isnan() & ~pool.isnan()
        per_row = 2 * 2 * self.sizes.kv_heads * self.sizes.head_dim
        assert int(written.sum()) == len(self.lengths) * per_row, "every row's keys and values, and nothing else"
        assert torch.allclose(pool[written].float(), exact_pool[written], atol=0.1, rtol=0.1)


def _wide(program: Any) -> Any:
    """The program in float32."""

    def linear(w: Linear) -> Linear:
        return Linear(w.weight.float(), None if w.bias is None else w.bias.float())

    found = []
    for op in program:
        changes: dict[str, Any] = {}
        if hasattr(op, "weight"):
            changes["weight"] = linear(op.weight)
        if getattr(op, "norm", None) is not None:
            changes["norm"] = Norm(op.norm.weight.float(), op.norm.eps)
        if hasattr(op, "shape") and op.shape.q_norm is not None:
            changes["shape"] = replace(op.shape, q_norm=op.shape.q_norm.float(), k_norm=op.shape.k_norm.float())
        found.append(replace(op, **changes) if changes else op)
    return found


@pytest.mark.parametrize(
    ("sizes", "lengths", "dtype", "shape"),
    [
        (SMALL, [1, 17, 200], torch.bfloat16, {}),  # one part of keys
        (SMALL, [300, 40, 513], torch.float16, {}),  # joined by launch 3
        (SMALL._replace(heads=3, kv_heads=1, bias=True, head_norms=False), [300, 20], torch.bfloat16, {}),  # by its own
        (SMALL, [600], torch.bfloat16, {"window": 300, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
        (SMALL._replace(kv_heads=4), [300, *range(1, 17)], torch.bfloat16, {"softcap": 20.0}),  # by launch 2
        (Sizes(hidden=80, inner=40, heads=2, kv_heads=1, head_dim=80), [9, 33], torch.bfloat16, {}),
    ],
)
def test_they_compute_the_layers(sizes, lengths, dtype, shape):
    Step(sizes, lengths, dtype, **{name: v.to(DEVICE) if name == "sinks" else v for name, v in shape.items()}).check()


def test_norms_in_float32_and_parts_of_the_residual():
    step = Step(SMALL, [5, 30])
    step.program = [
        replace(op, norm=op.norm._replace(weight=op.norm.weight.float()))
        if isinstance(op, NormLinear | NormGateUp)
        else replace(op, scale=0.22)
        if isinstance(op, LinearAdd)
        else op
        for op in step.program
    ]
    step.check()


def test_keys_and_values_in_eight_bits():
    """Against the single ops, from an empty pool: the first tokens of two sequences."""
    step = Step(SMALL._replace(kv_type="fp8", head_dim=32), [1, 1])
    found, pool = step.chained()
    wanted, wanted_pool = step.layered(make_triton_set(kv_type="fp8"))
    assert torch.allclose(found.float(), wanted.float(), atol=0.05, rtol=0.05)
    assert (pool.int() - wanted_pool.int()).abs().float().mean() < 0.5
    assert (pool != step.pool).any()


@pytest.mark.sim
def test_a_row_is_the_same_alone_and_in_any_step():
    """Bit for bit: other tiles of rows, other places in them, other ways to join the parts of keys."""
    step = Step(SMALL, [270, *range(1, 40)])
    together, _ = step.chained()
    for chosen in ([5], [39, 5, 17], list(range(1, 18))):
        alone, _ = step.chained(step.rows(*chosen), step.x[torch.tensor(chosen, device=DEVICE)])
        assert torch.equal(alone, together[torch.tensor(chosen, device=DEVICE)]), chosen
    with patch.object(decode_chain, "_LEAST_BUSY", 1000):
        assert torch.equal(step.chained()[0], together), "parts that a launch of its own joins"


def test_a_step_beyond_the_scratch_takes_further_launches(monkeypatch):
    step = Step(SMALL._replace(kv_heads=1), [300, 20, 600])
    monkeypatch.setattr(decode_chain, "_MOST_LATE_ROWS", 0)
    together, _ = step.chained()
    monkeypatch.setattr(decode_attention, "SCRATCH_BYTES", 4 * 4 * 3 * 32)
    assert torch.equal(step.chained()[0], together)


def test_other_programs_and_steps_are_left_to_single_ops():
    step = Step(SMALL, [5, 30])
    bind = decode_chain.bind_decodes
    plain, norm = step.program, step.program[0].norm
    row_norms = replace(plain[1].shape, q_norm=torch.ones(128), k_norm=torch.ones(64))
    for at, changed in (
        (0, replace(plain[0], norm=None)),
        (0, replace(plain[0], norm=norm._replace(centred=True))),
        (1, replace(plain[1], shape=row_norms)),
        (3, replace(plain[3], to="y")),
        (4, replace(plain[4], weight=object())),
    ):
        assert bind(step.attention, [*plain[:at], changed, *plain[at + 1 :]], ahead=False) is None, changed
    assert bind(step.attention, plain[:-1], ahead=False) is None
    chain = bind(step.attention, [*plain[:8], KeepSampled(), *plain[8:]], ahead=False)
    x = torch.full_like(step.x, 3.0)
    many = torch.zeros(decode_chain.MOST_ROWS + 1, SMALL.hidden, dtype=torch.bfloat16, device=DEVICE)
    prompt = step.step.over(max_query_len=2)
    for rows, each in (
        (x, prompt),
        (many, decodes([1] * len(many), device=DEVICE)),
        (x[:0], decodes([1], device=DEVICE)),
    ):
        assert chain(rows, [step.pool], each) is None
    assert bool((x == 3.0).all())
    with pytest.raises(ValueError, match="other bits"):
        make_triton_set(chained=True, deterministic=True)


# -- whole models


PROMPTS = ((5, 9, 77, 30, 12), tuple(range(20, 53)), (7, 8, 9))


def _model(**options: Any) -> Model:
    kernels = make_triton_set(**options) if options else None
    return Model(
        demo_model_path(), dtype=torch.bfloat16, device=str(DEVICE), num_blocks=32, max_model_len=256, kernels=kernels
    )


@pytest.mark.sim
def test_tokens_are_the_references():
    assert _model(chained=True).greedy(PROMPTS, 3) == _model().greedy(PROMPTS, 3)


@WHERE_ONE_LAUNCHES
@pytest.mark.parametrize(
    ("rows", "length", "launches"), [(1, 200, 5), (2, 900, 5), (64, 1000, 5), (1, 16000, 6), (8, 900, 6)]
)
def test_a_layer_takes_five_launches(rows, length, launches):
    """Six beyond 2,048 tokens, or where parts are neither few nor their rows many. None is run."""
    launched: Counter[str] = Counter()
    step = decodes([length] * rows)
    sizes = Sizes(hidden=128, inner=96, heads=4, kv_heads=2, head_dim=64)
    attention = TritonAttention()
    chain = decode_chain.bind_decodes(attention, layers(sizes, 3, torch.zeros, torch.bfloat16), ahead=False)
    pool = attention.new_kv(2, 3, 2, PAGE, 64, torch.bfloat16, torch.device("cpu"))

    def note(executor: Any, *_: Any, **__: Any) -> None:
        launched[executor.fn.__name__] += 1

    from triton.runtime import interpreter

    with patch.object(interpreter.GridExecutor, "__call__", note):
        chain(torch.zeros(rows, 128, dtype=torch.bfloat16), [pool], step)
    assert launched.pop("square_sums") == 1, "for the first norm of the step"
    assert sum(launched.values()) == 3 * launches, launched
    assert launched["chained_qkv"] == launched["decode_parts"] == launched["chained_gate_up"] == 3


@WHERE_ONE_LAUNCHES
@pytest.mark.parametrize("lengths", [[40], [300], [5] * 40])
def test_every_weight_is_loaded_once_for_a_tile_of_rows(lengths):
    """All programs of a launch together load as many bytes as the weights have, for each tile of rows."""
    step = Step(SMALL, lengths)
    weights = [op.weight.weight for op in step.program if hasattr(op, "weight")]
    loaded = [0] * len(weights)

    from triton.runtime import interpreter

    load = interpreter.InterpreterBuilder.create_masked_load

    def counted(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        at = ptrs.data[mask.data.astype(bool)]
        for index, weight in enumerate(weights):
            first = weight.data_ptr()
            loaded[index] += 2 * int(((at >= first) & (at < first + 2 * weight.numel())).sum())
        return load(builder, ptrs, mask, *rest)

    with patch.object(interpreter.InterpreterBuilder, "create_masked_load", counted):
        step.chained()
    tiles = -(-len(lengths) // 32) if len(lengths) > 16 else 1
    assert loaded == [tiles * 2 * weight.numel() for weight in weights]


# -- launches that begin early


def _steps_in_the_worst_order(module: ModuleType = decode_chain) -> None:
    """Two sequences, by the three ways to join parts of keys: the bits of launches that wait for each other."""
    from support.early_launches import early_launches

    step = Step(SMALL, [300, 40])
    wanted, _ = step.chained()
    for late, busy in ((4, 1000), (0, 1000), (0, 1)):
        with patch.object(module, "_MOST_LATE_ROWS", late), patch.object(module, "_LEAST_BUSY", busy):
            with early_launches() as order:
                found, _ = step.chained(module=module, ahead=True)
            assert order.issued >= 11
            assert torch.equal(found, wanted)
            assert not order.overtaken


@WHERE_ONE_LAUNCHES
def test_the_worst_order_of_launches_changes_nothing():
    _steps_in_the_worst_order()


@WHERE_ONE_LAUNCHES
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_of_order_are_found(fault, tmp_path):
    with pytest.raises(AssertionError):
        _short_steps(with_fault(fault, tmp_path))


def _short_steps(module: ModuleType) -> None:
    """Contexts of one part, for which a second one is planned, so that the launch that joins has nothing to do."""
    from support.early_launches import early_launches

    step = Step(SMALL, [40, 30])
    wanted, _ = step.chained()
    step.step = step.step.over(kv_lens=(300, 300))
    with patch.object(module, "_MOST_LATE_ROWS", 0), patch.object(module, "_LEAST_BUSY", 1000), early_launches():
        found, _ = step.chained(module=module, ahead=True)
    assert torch.equal(found, wanted)


@WHERE_ONE_LAUNCHES
def test_where_no_fault_of_order_is_planted_none_is_found():
    _short_steps(decode_chain)


@WHERE_ONE_LAUNCHES
@pytest.mark.sim
def test_whole_steps_in_the_worst_order_have_the_references_tokens():
    from support.early_launches import early_launches

    with early_launches() as order:
        found = _model(chained=True, ahead=True).greedy(PROMPTS[:2], 3)
    assert order.issued
    assert found == _model().greedy(PROMPTS[:2], 3)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value = (before + scale * total", "value = (before + total"),
        ("tl.sum(wide * wide, 0), mask=rows < num_rows)", "tl.sum(wide * wide, 0) * 0.5, mask=rows < num_rows)"),
        ("up.to(dtype).to(tl.float32)\n    value", "gate.to(dtype).to(tl.float32)\n    value"),
    ],
)
def test_planted_bugs_are_found(old, new, tmp_path):
    module = planted(chain_product, old, new, tmp_path, within=decode_chain)
    step = Step(SMALL, [5, 30])
    step.program = [replace(op, scale=0.5) if isinstance(op, LinearAdd) else op for op in step.program]
    with pytest.raises(AssertionError):
        step.check(module=module)


@pytest.mark.sim
def test_decodes_beside_a_prompt_are_served_by_single_ops():
    """A decode and a prompt in one step: the bits of the same set that chains nothing."""
    chained, single = _model(chained=True), _model(chained=False)
    for model in (chained, single):
        model.step(scheduled(PROMPTS[0], [9, 3], 0, 4, all_logits=False))
    items = (
        scheduled(PROMPTS[0], [9, 3], 4, 1, all_logits=False),
        scheduled(PROMPTS[2], [5, 1], 0, 3, all_logits=False),
    )
    assert all(torch.equal(a, b) for a, b in zip(chained.step(*items), single.step(*items), strict=True))
    assert chained.decoder._decodes is not None

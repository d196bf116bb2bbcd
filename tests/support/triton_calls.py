"""Calls of every Triton op at the sizes of real models, for the audit of what they compile to.

Promises: nothing is computed: tensors are uninitialised, launches are noted down in place of being run.
Must not know: how a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import get_args

import torch

from quire_kernels.adapter_places import AdapterPlaces
from quire_kernels.kernel_set import (
    Activation,
    Addend,
    AttentionShape,
    ChoiceRows,
    ExpertMatrices,
    Norm,
    Routing,
    expert_rows,
)
from quire_kernels.low_rank import AdaptedProduct
from quire_kernels.reference.linear import Linear
from quire_kernels.stored import StoredKind
from quire_kernels.triton.activation import gate_mul, mul_sigmoid
from quire_kernels.triton.attention import TritonAttention
from quire_kernels.triton.choose import choose
from quire_kernels.triton.copy_blocks import copy_blocks
from quire_kernels.triton.experts import ExpertOps
from quire_kernels.triton.low_rank import add_adapted
from quire_kernels.triton.norm import norm_add, rms_norm
from quire_kernels.triton.pool import KVType
from quire_kernels.triton.product import TiledProduct
from quire_kernels.triton.stored_product import StoredLinear, StoredProduct

_VOCABULARY = 151_936  # Qwen3's
_HIDDEN = (1024, 4096)  # Qwen3-0.6B's and Llama-3.1-8B's
_BF16 = torch.bfloat16


def _empty(*shape: int, dtype: torch.dtype = _BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _linear(num_outputs: int, num_inputs: int, dtype: torch.dtype, bias: bool = False) -> Linear:
    return Linear(_empty(num_outputs, num_inputs, dtype=dtype), _empty(num_outputs, dtype=dtype) if bias else None)


def _norms(_: int) -> None:
    for width in _HIDDEN:
        rms_norm(_empty(8, width), Norm(_empty(width), 1e-6))
        wide = Norm(_empty(width, dtype=torch.float32), 1e-6)
        rms_norm(_empty(8, width), wide)
        norm_add(_empty(8, width), wide, _empty(8, width))


def _gates(_: int) -> None:
    for activation in get_args(Activation):
        gate_mul(_empty(8, 2 * 3072), activation)
    mul_sigmoid(_empty(8, 4096), _empty(8, 4096))


def _product_of_few_rows(_: int) -> None:
    TiledProduct().linear(_empty(8, 1024), _linear(4096, 1024, _BF16, bias=True))


def _products(dtype: torch.dtype) -> None:
    product = TiledProduct()
    for num_rows in (8, 1000):
        product.linear(_empty(num_rows, 1024, dtype=dtype), _linear(4096, 1024, dtype, bias=True))
        product.linear_add(
            _empty(num_rows, 3072, dtype=dtype), _linear(1024, 3072, dtype), _empty(num_rows, 1024, dtype=dtype), 1.0
        )
    product.linear(_empty(1000, 4096, dtype=dtype), _linear(28672, 4096, dtype))
    for num_rows in (8, 1000):
        product.gate_up(_empty(num_rows, 1024, dtype=dtype), _linear(2 * 3072, 1024, dtype), "silu")
    product.logits(_empty(8, 1024, dtype=dtype), _linear(_VOCABULARY, 1024, dtype))


def _stored(kind: StoredKind, group: int, *, points: bool = False, dtype: torch.dtype = _BF16) -> None:
    """One row, a tile of few rows and tiles of many, with scales that two halves share and with their own."""
    columns, outputs = 4096, 4096
    groups = columns // group
    halves = 64 if group % 64 == 0 else 32
    w = StoredLinear(
        kind=kind,
        columns=columns,
        half=halves,
        group=group,
        base=-8,
        table=None,
        codes=_empty(outputs, columns // (2 if kind == "nibbles" else 1), dtype=torch.uint8),
        scales=_empty(groups, outputs, dtype=torch.float16),
        zero_points=_empty(groups, outputs, dtype=torch.int8) if points else None,
        offsets=None,
        bias=None,
    )
    for num_rows, same_tiles in ((1, False), (8, True), (1000, True)):
        StoredProduct(same_tiles=same_tiles).linear(_empty(num_rows, columns, dtype=dtype), w)


def _experts(dtype: torch.dtype) -> None:
    """Qwen3-30B-A3B's sizes but for the number of experts."""
    count, hidden, inner = 16, 2048, 768
    experts = ExpertMatrices(
        count=count,
        inner=inner,
        gate_up=_linear(2 * count * expert_rows(inner), hidden, dtype),
        down=_linear(count * expert_rows(hidden), inner, dtype),
        activation="silu",
    )
    routing = Routing(weight=_linear(count, hidden, dtype), top_k=8)
    scales = _empty(count, dtype=torch.float32)
    grouped = Routing(
        weight=_linear(count, hidden, torch.float32),
        top_k=4,
        scoring="sigmoid",
        selection_bias=scales,
        groups=4,
        kept_groups=2,
        expert_scales=scales,
    )
    few, ops = _empty(8, hidden, dtype=dtype), ExpertOps(same_tiles=False)
    ops.route(few, grouped, count)
    ops.gate_rows(few, None, _linear(1, hidden, dtype), few.clone())
    for num_rows, same_tiles in ((8, False), (8, True), (1000, False)):
        x = _empty(num_rows, hidden, dtype=dtype)
        norm = Norm(_empty(hidden, dtype=dtype), 1e-6)
        ExpertOps(same_tiles=same_tiles).mix_experts(x, norm, routing, experts, 1.0, x.clone())


def _adapters(dtype: torch.dtype) -> None:
    """Of rank 16 and 64, for Llama-3.1-8B's queries, keys and values, and for its down product."""
    products = (
        AdaptedProduct(num_rows=6144, num_inputs=4096, starts=(0, 4096, 5120)),
        AdaptedProduct(num_rows=28672, num_inputs=4096, starts=(0, 14336)),
        AdaptedProduct(num_rows=4096, num_inputs=14336, starts=(0,)),
    )
    for rank in (16, 64):
        for product in products:
            places = AdapterPlaces([product], 2, rank, dtype, torch.device("cpu"))
            for rows in (8, 1000):
                out = _empty(rows, product.num_rows, dtype=dtype)
                addend = Addend(slots=_empty(rows, dtype=torch.int32), matrices=(places[0],))
                add_adapted(out, _empty(rows, product.num_inputs, dtype=dtype), addend)


def choice_rows(num_rows: int, *, draws: bool = True, limits_k: bool = True, limits_p: bool = True) -> ChoiceRows:
    """Uninitialised parameters of the right types."""
    return ChoiceRows(
        logits_rows=_empty(num_rows, dtype=torch.int64),
        temperature=_empty(num_rows, dtype=torch.float32),
        top_k=_empty(num_rows, dtype=torch.int32),
        top_p=_empty(num_rows, dtype=torch.float64),
        min_p=_empty(num_rows, dtype=torch.float32),
        seed=_empty(num_rows, dtype=torch.int64),
        choice=_empty(num_rows, dtype=torch.int64),
        position=_empty(num_rows, dtype=torch.int64),
        draws=draws,
        limits_k=limits_k,
        limits_p=limits_p,
    )


def step_of(*lengths: tuple[int, int]) -> SimpleNamespace:
    """What the ops look at of a step of sequences with (rows, context)."""
    rows = sum(count for count, _ in lengths)
    return SimpleNamespace(
        positions=_empty(rows, dtype=torch.int64),
        kv_slots=_empty(rows, dtype=torch.int64),
        query_starts=_empty(len(lengths) + 1, dtype=torch.int32),
        context_lens=_empty(len(lengths), dtype=torch.int32),
        block_tables=_empty(len(lengths), 256, dtype=torch.int32),
        query_lens=[count for count, _ in lengths],
        kv_lens=[context for _, context in lengths],
        max_query_len=max(count for count, _ in lengths),
        max_context_len=max(context for _, context in lengths),
    )


def _attention(
    capability: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    kv_type: KVType = "auto",
    deterministic: bool = False,
    page: int = 16,
    **shape: int,
) -> None:
    """rope_write and both attention kernels of a mixed step: decode rows short and long, and a chunk of a prompt."""
    ops = TritonAttention(kv_type, warp_groups=capability in (90, 100), deterministic=deterministic)
    norms = {name: _empty(head_dim) for name in ("q_norm", "k_norm")}
    layer = AttentionShape(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, **norms, **shape
    )
    kv = ops.new_kv(8, 2, kv_heads, page, head_dim, _BF16, torch.device("cpu"))
    step = step_of((1, 100), (1, 3000), (512, 1024))
    rows = len(step.positions)
    qkv, rope = _empty(rows, (heads + 2 * kv_heads) * head_dim), _empty(4096, head_dim, dtype=torch.float32)
    ops.rope_write(qkv, rope, layer, kv, 1, step)
    ops.attention(_empty(rows, heads, head_dim), layer, kv, 1, step)


CASES: dict[str, Callable[[int], object]] = {
    "norm": _norms,
    "activation": _gates,
    "product quick": _product_of_few_rows,
    "product bf16": lambda _: _products(_BF16),
    "product fp16": lambda _: _products(torch.float16),
    "stored nibbles": lambda _: _stored("nibbles", 128, points=True),
    "stored nibbles fp16": lambda _: _stored("nibbles", 32, dtype=torch.float16),
    "stored bytes": lambda _: _stored("bytes", 64, points=True),
    "stored e4m3": lambda _: _stored("e4m3", 4096),
    "experts bf16": lambda _: _experts(_BF16),
    "experts fp16": lambda _: _experts(torch.float16),
    "adapters bf16": lambda _: _adapters(_BF16),
    "adapters fp16": lambda _: _adapters(torch.float16),
    "attention 16/8x128": lambda gpu: _attention(gpu, 16, 8, 128),
    "attention 32/8x128 fp8": lambda gpu: _attention(gpu, 32, 8, 128, kv_type="fp8"),
    "attention 32/8x128 deterministic": lambda gpu: _attention(gpu, 32, 8, 128, deterministic=True),
    "attention 24/8x128 fp8 deterministic": lambda gpu: _attention(gpu, 24, 8, 128, kv_type="fp8", deterministic=True),
    "attention 14/2x64": lambda gpu: _attention(gpu, 14, 2, 64),
    "attention 32/32x80": lambda gpu: _attention(gpu, 32, 32, 80),
    "attention 16/8x256 window": lambda gpu: _attention(gpu, 16, 8, 256, window=1024),
    "attention 16/8x256 deterministic": lambda gpu: _attention(gpu, 16, 8, 256, deterministic=True),
    "attention 16/8x256 fp8": lambda gpu: _attention(gpu, 16, 8, 256, kv_type="fp8"),
    # Gemma 4's layers without a window; an fp16 pool compiles to the same sizes.
    "attention 32/4x512": lambda gpu: _attention(gpu, 32, 4, 512),
    "attention 16/1x512 in blocks of 32": lambda gpu: _attention(gpu, 16, 1, 512, page=32),
    "attention 32/4x512 fp8": lambda gpu: _attention(gpu, 32, 4, 512, kv_type="fp8"),
    "attention 32/4x512 window deterministic": lambda gpu: _attention(gpu, 32, 4, 512, deterministic=True, window=1024),
    "attention 32/4x512 fp8 deterministic": lambda gpu: _attention(
        gpu, 32, 4, 512, kv_type="fp8", deterministic=True, page=32
    ),
    "attention 14/2x64 deterministic": lambda gpu: _attention(gpu, 14, 2, 64, deterministic=True),
    "attention 16/8x256 window deterministic": lambda gpu: _attention(gpu, 16, 8, 256, deterministic=True, window=1024),
    "copies": lambda _: copy_blocks(_empty(8, 2, 2, 8, 16, 128), [(1, 2), (3, 4)]),
    "greedy": lambda _: choose(
        _empty(8, _VOCABULARY, dtype=torch.float32), choice_rows(8, draws=False, limits_k=False, limits_p=False)
    ),
    "draw": lambda _: choose(_empty(8, _VOCABULARY, dtype=torch.float32), choice_rows(8)),
}

"""Launches that follow each other: the gap between two, and a layer's launches over many sets of weights.

Promises: everything is replayed as one graph; weights are more bytes together than the caches hold. Needs a GPU and
Triton. Must not know: how results are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gpu.shapes import ModelShape
from gpu.timing import time_calls
from quire_engine.tools.gpu_limits import Limits
from quire_kernels.kernel_set import (
    Attend,
    AttentionShape,
    BoundDecodes,
    LayerOp,
    LinearAdd,
    Norm,
    NormGateUp,
    NormLinear,
    RopeWrite,
)
from quire_kernels.layer_program import run_layers
from quire_kernels.reference.linear import Linear
from quire_kernels.triton.set import make_triton_set
from quire_kernels.verify.steps import Slice, Step, Tables

_CONTEXT, _BLOCK = 512, 16
_LAUNCHES = 512  # of the chain whose gaps are measured
_LEAST_AHEAD = (9, 0)
Row = dict[str, str | int | float]


@triton.jit  # type: ignore[untyped-decorator]
def _pass_on(x: Any, out: Any, AHEAD: tl.constexpr) -> None:
    if AHEAD:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.arange(0, 32)
    tl.store(out + at, tl.load(x + at) + 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _read(x: Any, out: Any, count: Any, BLOCK: tl.constexpr) -> None:
    total = tl.zeros([BLOCK], tl.float32)
    for at in tl.range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        total += tl.load(x + at + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def gap_rows(device: torch.device, *, repeat: int) -> list[Row]:
    """Microseconds of a launch that computes next to nothing, in a graph of many, and the rate of reading alone."""
    a, b = torch.zeros(2, 32, device=device)
    found: list[Row] = []
    for ahead in (False, True)[: 1 + (torch.cuda.get_device_capability(device) >= _LEAST_AHEAD)]:
        options = {"launch_pdl": True} if ahead else {}

        def launch(i: int, ahead: bool = ahead, options: dict[str, bool] = options) -> None:
            source, target = (a, b) if i % 2 else (b, a)
            _pass_on[(1,)](source, target, AHEAD=ahead, num_warps=1, **options)

        timed = time_calls(launch, device, calls=_LAUNCHES, repeat=repeat)
        name = "a launch, with programmatic dependence" if ahead else "a launch"
        found.append({"what": name, "us": timed.seconds * 1e6})
    count = 1 << 28  # 1 GiB
    x, sums = torch.zeros(count, device=device), torch.empty(4096, device=device)
    timed = time_calls(
        lambda _: _read[(2048,)](x, sums, count, BLOCK=4096, num_warps=8), device, calls=4, repeat=repeat
    )
    found.append({"what": "reading alone", "GB/s": 4 * count / timed.seconds / 1e9})
    return found


def chain_rows(shape: ModelShape, batches: Sequence[int], limits: Limits, device: torch.device) -> list[Row]:
    """A step's layers without its head, by single ops and in five launches a layer, without and with dependence."""
    layers = min(shape.layers, 28)
    program = _program(shape, layers, device)
    weights = sum(op.weight.weight.nbytes for op in program if hasattr(op, "weight"))
    found: list[Row] = []
    for count in batches:
        tables = Tables([_CONTEXT] * count, _BLOCK)
        step = replace(tables.step([Slice(i, _CONTEXT - 1, 1) for i in range(count)], device), sampled=None)
        pool = (tables.num_blocks, layers, shape.kv_heads, _BLOCK, shape.head_dim)
        num_bytes = weights + layers * count * _CONTEXT * 2 * shape.kv_heads * shape.head_dim * 2
        x = torch.randn(count, shape.hidden, device=device).bfloat16()
        for name, work in _ways(program, x, step, pool, device):
            seconds = time_calls(work, device, calls=1, repeat=10).seconds
            found.append(
                {
                    "shape": shape.name,
                    "rows": count,
                    "how": name,
                    "us a layer": seconds / layers * 1e6,
                    "of memory": num_bytes / seconds / limits.read_bytes_per_second,
                }
            )
    return found


def _ways(
    program: list[LayerOp], x: Tensor, step: Step, pool: tuple[int, int, int, int, int], device: torch.device
) -> list[tuple[str, Callable[[int], object]]]:
    capability = torch.cuda.get_device_capability(device)
    single = make_triton_set(warp_groups=capability[0] in (9, 10))
    kv = single.new_kv(*pool, torch.bfloat16, device)
    found: list[tuple[str, Callable[[int], object]]] = [
        ("single ops", lambda _: run_layers(single, program, x.clone(), [kv], step))
    ]
    for ahead in (False, True)[: 1 + (capability >= _LEAST_AHEAD)]:
        kernels = make_triton_set(warp_groups=capability[0] in (9, 10), chained=True, ahead=ahead)
        assert kernels.bind_decodes is not None
        chain = kernels.bind_decodes(program)
        assert chain is not None
        name = "five launches, dependent" if ahead else "five launches"
        found.append((name, partial(_run, chain, x, kv, step)))
    return found


def _run(chain: BoundDecodes, x: Tensor, kv: Tensor, step: Step, _: int) -> object:
    return chain(x.clone(), [kv], step)


def _program(shape: ModelShape, layers: int, device: torch.device) -> list[LayerOp]:
    def linear(outputs: int, inputs: int) -> Linear:
        values = torch.empty(outputs, inputs, dtype=torch.bfloat16, device=device)
        return Linear(values.uniform_(-1, 1).mul_(inputs**-0.5), None)

    def norm(width: int) -> Tensor:
        return torch.ones(width, dtype=torch.bfloat16, device=device)

    rope = torch.ones(_CONTEXT, shape.head_dim, device=device)
    width = shape.heads * shape.head_dim
    program: list[LayerOp] = []
    for layer in range(layers):
        attention = AttentionShape(
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            q_norm=norm(shape.head_dim),
            k_norm=norm(shape.head_dim),
        )
        gate_up = linear(2 * shape.intermediate, shape.hidden)
        program += [
            NormLinear(norm=Norm(norm(shape.hidden), 1e-6), weight=linear(shape.qkv, shape.hidden)),
            RopeWrite(shape=attention, rope=rope, layer=layer),
            Attend(shape=attention, layer=layer),
            LinearAdd(source="mixed", weight=linear(shape.hidden, width)),
            NormGateUp(norm=Norm(norm(shape.hidden), 1e-6), weight=gate_up, activation="silu"),
            LinearAdd(source="wide", weight=linear(shape.hidden, shape.intermediate)),
        ]
    return program

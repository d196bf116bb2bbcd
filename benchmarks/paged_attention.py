"""What paging costs attention: the same kernel over scattered blocks and over one contiguous block a sequence.

    python -m benchmarks.paged_attention [--device cpu|cuda] [--repeat N]

Decodes of random sequences by the kernel set that would serve; the layouts are timed in turns, and ratios are taken
round by round. Beside them torch's own attention over contiguous tensors, which has no tables at all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from quire_engine.contract.batch import Batch, ScheduledSequence
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution.model_input import ModelInput, model_input
from quire_engine.execution.step_tensors import step_tensors
from quire_kernels.kernel_set import AttentionShape, KernelSet, KVFormat
from quire_kernels.select import select

SHAPE = AttentionShape(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)  # of Qwen3-0.6B
BLOCK = 16
BATCHES, CONTEXTS = (1, 8, 32), (256, 1024, 4096)
LAYERS = 4  # their pools together are larger than the caches, as a model's are


def main() -> int:
    parser = argparse.ArgumentParser(prog="paged_attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", type=int, default=9, help="rounds [9]")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    table = Table("sequences", "context", "contiguous, us", "paged in order", "paged, scattered", "torch, contiguous")
    for batch in BATCHES:
        for context in CONTEXTS:
            table.add_row(str(batch), str(context), *_row(device, batch, context, asked.repeat))
    Console().print(table)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ratios to contiguous, lowest to highest")
    return 0


def _row(device: torch.device, batch: int, context: int, repeat: int) -> list[str]:
    generator = torch.Generator().manual_seed(batch * context)
    whole = -(-context // BLOCK)
    in_order = [list(range(i * whole, (i + 1) * whole)) for i in range(batch)]
    shuffled = torch.randperm(batch * whole, generator=generator).tolist()
    scattered = [shuffled[i * whole : (i + 1) * whole] for i in range(batch)]
    calls = [
        _paged(device, [[i] for i in range(batch)], context, whole * BLOCK),
        _paged(device, in_order, context, BLOCK),
        _paged(device, scattered, context, BLOCK),
        _unpaged(device, batch, context),
    ]
    for call in calls:
        _seconds(call, device, 2)
    count = max(3, int(0.02 / _seconds(calls[0], device, 3)))
    rounds = [[_seconds(call, device, count) for call in calls] for _ in range(repeat)]
    contiguous = statistics.median(each[0] for each in rounds)
    ratios = [[each[i] / each[0] for each in rounds] for i in range(1, len(calls))]
    shown = [f"{statistics.median(r):.2f}x ({min(r):.2f}-{max(r):.2f})" for r in ratios]
    return [f"{contiguous * 1e6:.0f}", *shown]


def _paged(device: torch.device, tables: list[list[int]], context: int, block_size: int) -> Callable[[], object]:
    """One decode step of attention in all layers, the last position of each sequence over the whole context."""
    kernels = _kernels(device, block_size)
    num_blocks = sum(map(len, tables))
    pool = kernels.new_kv(num_blocks, LAYERS, SHAPE.num_kv_heads, block_size, SHAPE.head_dim, torch.bfloat16, device)
    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    rope = torch.cat([torch.ones(context, SHAPE.head_dim // 2), torch.zeros(context, SHAPE.head_dim // 2)], 1)
    for table in tables:
        step = _input(_batch([_slice(table, 0, context)]), block_size, device)
        for layer in range(LAYERS):
            qkv = torch.randn(context, width).to(torch.bfloat16).to(device)
            kernels.rope_write(qkv, rope.to(device), SHAPE, pool, layer, step)
    step = _input(_batch([_slice(table, context - 1, 1) for table in tables]), block_size, device)
    q = torch.randn(len(tables), SHAPE.num_heads, SHAPE.head_dim).to(torch.bfloat16).to(device)
    return lambda: [kernels.attention(q, SHAPE, pool, layer, step) for layer in range(LAYERS)]


def _unpaged(device: torch.device, batch: int, context: int) -> Callable[[], object]:
    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(batch, heads, length, SHAPE.head_dim).to(torch.bfloat16).to(device)

    q = normal(SHAPE.num_heads, 1)
    kv = [(normal(SHAPE.num_kv_heads, context), normal(SHAPE.num_kv_heads, context)) for _ in range(LAYERS)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: [attend(q, k, v, scale=SHAPE.scale, enable_gqa=True) for k, v in kv]


def _kernels(device: torch.device, block_size: int) -> KernelSet:
    return select(device, torch.bfloat16, "auto", kv=KVFormat(head_dim=SHAPE.head_dim, block_size=block_size))


def _slice(table: list[int], start: int, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(
        sequence_id=table[0],
        choice=0,
        prompt_token_ids=(0,) * (start + num_tokens),
        output_token_ids=(),
        token_ids=(0,) * num_tokens,
        start=start,
        block_ids=tuple(table),
        wants_sample=True,
        wants_prompt_logprobs=False,
        forks=(),
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=1),
    )


def _input(batch: Batch, block_size: int, device: torch.device) -> ModelInput:
    return model_input(step_tensors(batch, block_size, 1), block_size, device)


def _batch(items: list[ScheduledSequence]) -> Batch:
    return Batch(step_id=0, items=tuple(items), num_tokens=sum(item.num_tokens for item in items))


def _seconds(call: Callable[[], object], device: torch.device, count: int) -> float:
    """Seconds of one call, the mean of `count`."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count


if __name__ == "__main__":
    sys.exit(main())

"""What swaps cost: `python -m gpu.swaps` with the project's folders in PYTHONPATH, two minutes on one GPU.

Promises: a copy's bandwidth, what a decode step takes with blocks on their way both ways beside it, and from how slow a
copy on it is cheaper to compute again; JSON lines. Must not know: how blocks are copied, who would be preempted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from gpu.shapes import QWEN3_06B, ModelShape, write_checkpoint
from gpu.steps import StepBench, StepSizes, engine_config
from quire_engine.build import build
from quire_engine.contract.batch import Batch, StepResult
from quire_engine.engine import StepExecutor

SIZES = StepSizes(batches=(8, 64), context=512, steps=64, prefills=(1024, 4096), requests=0, lengths=(1, 1), repeat=5)
BLOCKS = (0, 1, 4, 16, 64)  # that go out, and as many that come in, in every step
HOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTime:
    """The median of decode steps beside which so many blocks are on their way out, and as many in."""

    batch: int
    blocks: int
    seconds: float
    bytes_each_way: int


class Swapping:
    """An executor that swaps blocks that nobody looks at: out from the pool's first, in to its last."""

    def __init__(self, executor: StepExecutor, num_blocks: int, num_host_blocks: int) -> None:
        self._executor, self._num_blocks, self._num_host_blocks = executor, num_blocks, num_host_blocks
        self.count = 0

    @property
    def max_in_flight(self) -> int:
        return self._executor.max_in_flight

    def launch(self, batch: Batch) -> None:
        turn = batch.step_id * 2 * self.count
        host = [(turn + i) % self._num_host_blocks for i in range(2 * self.count)]
        out = tuple(enumerate(host[: self.count]))
        into = tuple((host[self.count + i], self._num_blocks - 1 - i) for i in range(self.count))
        self._executor.launch(replace(batch, swap_out=out, swap_in=into))

    def collect(self) -> StepResult:
        return self._executor.collect()

    def forget_host_blocks(self, blocks: Sequence[int]) -> None:
        self._executor.forget_host_blocks(blocks)

    def prepare(self) -> int:
        return self._executor.prepare()


def measured(
    shape: ModelShape, device: str, sizes: StepSizes, host_bytes: int = HOST_BYTES
) -> Iterator[dict[str, object]]:
    """One fact at a time. The pool must be larger than what the sequences hold by as many blocks as come in."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        write_checkpoint(shape, path)
        asked = replace(engine_config(path, device, sizes), swap_space=host_bytes, swap_on_cpu=True)
        built = build(asked)
    plan = built.plan
    seconds = plan.scheduler.swap_seconds
    yield {
        "model": shape.name,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "bytes_per_block": plan.pool.bytes_per_block,
        "seconds_per_block": seconds,
        "bytes_per_second": plan.pool.bytes_per_block / seconds,
    }
    swapping = Swapping(built.executor, plan.scheduler.num_blocks, plan.scheduler.num_host_blocks)
    bench = StepBench(plan, swapping, sizes, lambda text: print(text, file=sys.stderr))
    most = min(plan.scheduler.num_host_blocks, plan.scheduler.num_blocks) // 2
    for count in (count for count in BLOCKS if count <= most):
        swapping.count = count
        for decode in bench.decodes(f"{count} blocks each way"):
            num_bytes = count * plan.pool.bytes_per_block
            yield asdict(SwapTime(batch=decode.batch, blocks=count, seconds=decode.seconds, bytes_each_way=num_bytes))
    swapping.count = 0
    for prefill in bench.prefills():
        token = prefill.seconds / prefill.tokens
        recompute = token * plan.scheduler.limits.block_size
        yield {
            "prompt_tokens": prefill.tokens,
            "seconds_per_token": token,
            "recompute_seconds_per_block": recompute,
            "swap_seconds_per_block": 2 * seconds,
            "swap_is_cheaper_by": recompute / (2 * seconds),
        }


def main() -> int:
    if not torch.cuda.is_available():
        print("swaps: no CUDA device", file=sys.stderr)
        return 1
    for fact in measured(QWEN3_06B, "cuda", SIZES):
        print(json.dumps(fact), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

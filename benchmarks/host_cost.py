"""Host cost of one engine step at 64 running sequences: everything but the model.

    make bench            (or: python -m benchmarks.host_cost [--sequences N] [--steps N])

Drives the real scheduler and the real frames with an executor that invents tokens, and prints the median and the
spread of each part over all steps of pure decode. Exits with 1 when the median of the whole is above the limit.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table

from quire_engine.batch import Batch, SampledToken, StepResult
from quire_engine.execution.model_input import ModelInput, model_input
from quire_engine.execution.step_tensors import step_tensors
from quire_engine.limits import SchedulerConfig, SchedulerLimits
from quire_engine.process.transport import FrameDecoder, encode_frame
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.types import GenerationRequest, SamplingParams, StepOutput, StopParams

LIMIT_MS = 1.0
PARTS = ("schedule", "apply", "encode frame", "decode frame")  # the limit is on their sum
CPU = torch.device("cpu")
Result = TypeVar("Result")


def invent(batch: Batch) -> StepResult:
    return StepResult(
        samples={
            item.sequence_id: (SampledToken(token_id=7 + item.end % 100),) for item in batch.items if item.wants_sample
        }
    )


def _input(batch: Batch, block_size: int) -> ModelInput:
    return model_input(step_tensors(batch, block_size, 1 << 31), block_size, CPU)


def run(sequences: int, steps: int, prompt_tokens: int) -> dict[str, list[float]]:
    """Milliseconds of each part of each decode step."""
    config = SchedulerConfig(
        num_blocks=sequences * (prompt_tokens + steps + 64) // 16 + 2 * sequences,
        max_model_len=prompt_tokens + 2 * steps + 64,
        limits=SchedulerLimits(max_num_seqs=sequences, max_num_batched_tokens=max(512, 2 * sequences)),
    )
    scheduler = Scheduler(config)
    for i in range(sequences):
        request = GenerationRequest(
            request_id=f"{i:032x}",
            prompt_token_ids=tuple(range(i, i + prompt_tokens)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=steps + 64, stop_token_ids=(0,)),
        )
        scheduler.add(request, 0.0)
    decoder = FrameDecoder()
    times: dict[str, list[float]] = {name: [] for name in (*PARTS, "sum", "model input")}

    def timed(name: str, call: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        value = call()
        times[name].append((time.perf_counter() - started) * 1e3)
        return value

    def applied(batch: Batch, result: StepResult) -> StepOutput:
        outputs = tuple(scheduler.apply(batch, result, 0.0))  # as if at once: no step nears --itl-target
        return StepOutput(step_id=batch.step_id, outputs=outputs, stats=scheduler.stats())

    while len(times["sum"]) < steps:
        decoding = scheduler.stats().decode_tokens == sequences
        batch = timed("schedule", partial(scheduler.schedule, 0.0))
        assert batch is not None
        timed("model input", partial(_input, batch, config.limits.block_size))
        output = timed("apply", partial(applied, batch, invent(batch)))
        frame = timed("encode frame", partial(encode_frame, output))
        timed("decode frame", partial(decoder.feed, frame))
        if not decoding:
            for name in (*PARTS, "model input"):
                times[name].pop()
            continue
        times["sum"].append(sum(times[name][-1] for name in PARTS))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64, help="running sequences (64)")
    parser.add_argument("--steps", type=int, default=1000, help="decode steps to measure (1000)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of each prompt (128)")
    asked = parser.parse_args()
    times = run(asked.sequences, asked.steps, asked.prompt_tokens)
    table = Table(title=f"host cost per decode step, {asked.sequences} sequences, {asked.steps} steps, ms")
    for column in ("part", "median", "p10", "p90", "max"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, values in times.items():
        deciles = statistics.quantiles(values, n=10)
        row = (statistics.median(values), deciles[0], deciles[-1], max(values))
        table.add_row(name if name != "sum" else "sum of the above", *(f"{v:.3f}" for v in row))
    console = Console()
    console.print(table)
    median = statistics.median(times["sum"])
    verdict = "within" if median <= LIMIT_MS else "ABOVE"
    console.print(
        f"{platform.python_version()} on {platform.machine()}: {median:.3f} ms, {verdict} the {LIMIT_MS:g} ms limit"
    )
    return 0 if median <= LIMIT_MS else 1


if __name__ == "__main__":
    sys.exit(main())

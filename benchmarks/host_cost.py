"""Host cost of one engine step at 64 running sequences: everything but the model.

    make bench            (or: python -m benchmarks.host_cost [--sequences N] [--steps N] [--collect-in-steps])

Drives the real scheduler and the real frames with an executor that invents tokens, and prints the median and the
spread of each part over all steps of pure decode. Exits with 1 when the median of the whole is above the limit.

Garbage is collected between steps, as in the engine process, and in the part that is called so; with
`--collect-in-steps` wherever Python does it by itself.
"""

from __future__ import annotations

import argparse
import gc
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

from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.decodes import BatchInColumns
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.contract.token_columns import step_output
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.execution.model_input import ModelInput, model_input
from quire_engine.execution.step_tensors import step_tensors
from quire_engine.process.loop import Garbage
from quire_engine.process.transport import FrameDecoder, FrameEncoder
from quire_engine.scheduling.scheduler import Scheduler

LIMIT_MS = 1.0
PARTS = ("schedule", "apply", "encode frame", "decode frame")  # the limit is on their sum
CPU = torch.device("cpu")
Result = TypeVar("Result")


def invent(batch: Batch) -> StepResult:
    return StepResult(
        samples={
            item.sequence_id: (SampledToken(token_id=7 + item.end % 100),) for item in batch.others if item.wants_sample
        },
        decoded=(8 + batch.decodes.positions % 100).tolist() if isinstance(batch, BatchInColumns) else None,
    )


def _input(batch: Batch, block_size: int) -> ModelInput:
    return model_input(step_tensors(batch, block_size, 1 << 31), block_size, CPU)


def run(sequences: int, steps: int, prompt_tokens: int, *, in_steps: bool = False) -> dict[str, list[float]]:
    """Milliseconds of each part of each decode step; `in_steps`: Python's collector runs wherever it wants to."""
    if in_steps:
        return _run(sequences, steps, prompt_tokens, None)
    gc.collect()
    gc.freeze()
    try:
        return _run(sequences, steps, prompt_tokens, Garbage())
    finally:
        gc.enable()
        gc.unfreeze()


def _run(sequences: int, steps: int, prompt_tokens: int, garbage: Garbage | None) -> dict[str, list[float]]:
    budget = max(512, 2 * sequences)
    # Prompts enter with what the decodes leave of a step, and the first answers must not end before the last prompt is
    # in and all steps are measured: both begin at once otherwise, and no step has every sequence decode.
    to_enter = -(-sequences * prompt_tokens // (budget - sequences)) + sequences
    answer = steps + to_enter
    config = SchedulerConfig(
        num_blocks=sequences * (-(-(prompt_tokens + answer) // 16) + 1),
        max_model_len=prompt_tokens + answer,
        limits=SchedulerLimits(max_num_seqs=sequences, max_num_batched_tokens=budget),
    )
    scheduler = Scheduler(config)
    for i in range(sequences):
        request = GenerationRequest(
            request_id=f"{i:032x}",
            prompt_token_ids=tuple(range(i, i + prompt_tokens)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=answer, stop_token_ids=(0,)),
        )
        scheduler.add(request, 0.0)
    encoder, decoder = FrameEncoder(), FrameDecoder()
    times: dict[str, list[float]] = {name: [] for name in (*PARTS, "sum", "model input", "garbage")}

    def timed(name: str, call: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        value = call()
        times[name].append((time.perf_counter() - started) * 1e3)
        return value

    def applied(batch: Batch, result: StepResult) -> StepOutput:
        outputs = scheduler.apply_result(batch, result, 0.0)  # as if at once: no step nears --itl-target
        return step_output(outputs, step_id=batch.step_id, stats=scheduler.stats())

    while len(times["sum"]) < steps:
        decoding = scheduler.stats().decode_tokens == sequences
        batch = timed("schedule", partial(scheduler.schedule, 0.0))
        assert batch is not None
        timed("model input", partial(_input, batch, config.limits.block_size))
        output = timed("apply", partial(applied, batch, invent(batch)))
        frame = timed("encode frame", partial(encoder.encode, output))
        timed("decode frame", partial(decoder.feed, frame))
        timed("garbage", garbage.after_step if garbage is not None else _nothing)
        if not decoding:
            for name in (*PARTS, "model input", "garbage"):
                times[name].pop()
            continue
        times["sum"].append(sum(times[name][-1] for name in PARTS))
    return times


def _nothing() -> None:
    pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64, help="running sequences (64)")
    parser.add_argument("--steps", type=int, default=1000, help="decode steps to measure (1000)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of each prompt (128)")
    parser.add_argument("--collect-in-steps", action="store_true", help="leave Python's collector of garbage alone")
    asked = parser.parse_args()
    times = run(asked.sequences, asked.steps, asked.prompt_tokens, in_steps=asked.collect_in_steps)
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

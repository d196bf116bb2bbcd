"""The curve of a step's time against its rows, 1 to 2,048, with its knees; on a CPU by both ways of fetching.

    python -m benchmarks.step_curve MODEL [--quantization int8] [--rows 1,8,32] [--rounds 5] [--fetch both]

A step is one prompt of so many tokens, computed by the engine that serves, in a pool that no request has blocks of.
Sizes and ways of fetching (docs/start.md, "CPUs and instruction sets") take turns in one process, over the same weights
in the same memory. Times are medians of the rounds; the last column is the median of the ratios within a round.
`quire calibrate` measures the engine under requests and writes the table that simulations use.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import get_args

from rich.console import Console
from rich.table import Table

from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.cost_model import knees
from quire_engine.execution.drafting.row_costs import measuring_step
from quire_kernels.kernel_set import Fetch
from quire_server.checkpoint.locate import localized
from quire_server.flags import parse_flags

# Around the ends of tiles of 4, 6, 16 and 32 rows, then ever fewer.
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
FETCHES: tuple[Fetch, ...] = get_args(Fetch)
Seconds = dict[tuple[int, Fetch | None], list[float]]


def measure(built: BuiltEngine, rows: Sequence[int], rounds: int, fetches: Sequence[Fetch | None]) -> Seconds:
    """Seconds of each round's step, by rows and way of fetching; None: the one that the kernels chose.

    Raises RuntimeError where a step fails.
    """
    batches = {count: measuring_step(count, built.plan.scheduler, guessed=False) for count in rows}
    found: Seconds = {(count, fetch): [] for count in rows for fetch in fetches}
    for number in range(rounds + 1):  # the first one warms up
        for count, batch in batches.items():
            for fetch in fetches if number % 2 else reversed(fetches):
                if fetch is not None and built.kernels is not None and built.kernels.fetch is not None:
                    built.kernels.fetch(fetch)
                started = time.perf_counter()
                built.executor.launch(batch)
                result = built.executor.collect()
                if number:
                    found[count, fetch].append(time.perf_counter() - started)
                if result.errors:
                    raise RuntimeError(next(iter(result.errors.values())))
    return found


def curve(found: Seconds, fetch: Fetch | None) -> list[tuple[int, float]]:
    """(rows, median seconds), made to rise: a disturbance only lengthens a step."""
    medians = [(rows, statistics.median(times)) for (rows, each), times in found.items() if each == fetch]
    least = float("inf")
    rising = []
    for rows, seconds in reversed(medians):
        least = min(least, seconds)
        rising.append((rows, least))
    return rising[::-1]


def print_curves(found: Seconds, fetches: Sequence[Fetch | None], title: str, console: Console) -> None:
    curves = {fetch: dict(curve(found, fetch)) for fetch in fetches}
    bends = {fetch: knees(list(curves[fetch].items())) for fetch in fetches}
    table = Table(title=title, title_justify="left")
    table.add_column("rows", justify="right")
    for fetch in fetches:
        table.add_column("time" if fetch is None else fetch, justify="right")
        table.add_column("rows/s", justify="right")
        table.add_column("knee")
    if len(fetches) > 1:
        table.add_column(f"{fetches[0]} to {fetches[-1]}", justify="right")
    for rows in curves[fetches[0]]:
        cells = [f"{rows:,}"]
        for fetch in fetches:
            seconds = curves[fetch][rows]
            cells += [
                f"{1e3 * seconds:,.2f} ms",
                f"{rows / seconds:,.0f}",
                "more cost more" if rows in bends[fetch] else "",
            ]
        if len(fetches) > 1:
            both = zip(found[rows, fetches[0]], found[rows, fetches[-1]], strict=True)
            cells.append(f"{statistics.median(one / other for one, other in both):.2f}x")
        table.add_row(*cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="A step's time against its rows.")
    parser.add_argument("model")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--rows", type=lambda text: tuple(sorted({int(each) for each in text.split(",")})), default=ROWS
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--fetch", choices=("chosen", "both"), default="chosen", help="both: in turns, where there is a choice"
    )
    asked = parser.parse_args()
    config = EngineConfig(
        model=localized(parse_flags(["--model", asked.model])).model,
        quantization=asked.quantization,
        kv_cache_dtype=asked.kv_cache_dtype,
        num_threads=asked.threads,
        device="cpu",
        limits=SchedulerLimits(max_num_batched_tokens=max(*asked.rows, 2)),
    )
    built = build(config)
    plan, machine = built.plan, built.plan.machine
    most = min(plan.scheduler.max_model_len, plan.scheduler.num_blocks * plan.scheduler.limits.block_size)
    rows = [count for count in asked.rows if count <= most]
    fetches: Sequence[Fetch | None] = FETCHES if asked.fetch == "both" else (None,)
    title = (
        f"{machine.cpu_variant} ({machine.why_cpu_variant}), {machine.num_threads} threads,"
        f" {plan.model.quantization or plan.model.dtype}"
    )
    try:
        print_curves(measure(built, rows, asked.rounds, fetches), fetches, title, Console(width=140))
    finally:
        built.close()


if __name__ == "__main__":
    main()

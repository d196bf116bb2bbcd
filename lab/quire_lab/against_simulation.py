"""Simulated against live: `python -m quire_lab.against_simulation` serves traces both ways and prints the errors.

Promises: the same rows at the same speeds, live by `quire serve` on this machine, simulated by the cost model of a
calibration, with what requests that are alone show of the server around the engine; exit code 0 when p50 is within 10 %
and p95 within 20 % everywhere, else 1 with every miss in the table.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from quire_bench.arguments import parse_arguments
from quire_bench.benchmark import run_benchmark
from quire_bench.measures import Measures
from quire_bench.servers import BenchError
from quire_bench.traces import TraceError, read_trace
from quire_engine.contract.errors import ConfigError
from quire_engine.cost_model import CostModel, read_cost
from quire_lab.simulation.report import Report, report
from quire_lab.simulation.setup import Setup, setup
from quire_lab.simulation.simulator import simulate
from quire_server.http.event_loop import loop_factory
from quire_server.settings import SettingsError

DONE, FAILED, BAD_USAGE = 0, 1, 2
_LIMITS = {"p50": 0.10, "p95": 0.20}
_QUANTITIES = ("ttft", "tpot", "e2e")
_ALONE_INPUT, _ALONE_OUTPUT, _ALONE_REQUESTS = 256, 32, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One percentile at one load. Seconds."""

    trace: str
    speed: float
    requests: int
    quantity: str
    statistic: str
    live: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.live - 1

    @property
    def ok(self) -> bool:
        return abs(self.error) <= _LIMITS[self.statistic]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, simulate, print; the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    given = _parser().parse_args(words[:split])
    try:
        cost, plain = read_cost(given.cost)
        cost = with_server(cost, _measure_alone(words[split + 1 :]))
        print(f"the server adds {1e3 * cost.request:.3g} ms to a request; a step takes {1e3 * cost.step:.4g} ms there")
        asked = setup(plain, cost)
        lines = [line for trace in given.trace for line in _compare(trace, given, words[split + 1 :], asked)]
    except (BenchError, ConfigError, SettingsError, TraceError) as error:
        print(f"against_simulation: {error}", file=sys.stderr)
        return BAD_USAGE
    print_lines(lines)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode([asdict(line) for line in lines])) + b"\n")
    return DONE if all(line.ok for line in lines) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quire_lab.against_simulation",
        usage="%(prog)s [flags] [-- flags of quire serve]",
        description="Serve traces on this machine and simulate them; print both with their errors.",
    )
    parser.add_argument("--trace", type=Path, action="append", required=True, metavar="FILE", help="may be repeated")
    parser.add_argument("--cost", default="quire-calibration.json", metavar="FILE", help="of quire calibrate")
    parser.add_argument("--scale-rate", default="1", metavar="X,X,...", help="speeds of the traces [1]")
    parser.add_argument("--scale-len", default="1", metavar="X", help="multiplies lengths [1]")
    parser.add_argument("--requests", default="200", metavar="N", help="the first N of each trace [200]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the lines here")
    return parser


def _measure_alone(flags: Sequence[str]) -> Measures:
    """Requests one at a time, of lengths that no trace is asked for, on a server of their own."""
    bench = ["--concurrency", "1", "--input", str(_ALONE_INPUT), "--output", str(_ALONE_OUTPUT)]
    bench += ["--requests", str(_ALONE_REQUESTS), "--repeat", "1", "--no-probe", "--", *flags]
    return _bench(bench)


def with_server(cost: CostModel, alone: Measures) -> CostModel:
    """The engine's costs, and what HTTP and text on the same cores add to a request and to a step.

    `quire calibrate` measures the engine by itself. The medians of requests that are alone tell the rest: in the time
    to the first token, and in each one after it.
    """
    context = _ALONE_INPUT + _ALONE_OUTPUT // 2
    first, later = 1e-3 * (alone.ttft_ms.p50 or 0.0), 1e-3 * (alone.tpot_ms.p50 or 0.0)
    request = max(0.0, first - cost.prompt_seconds(_ALONE_INPUT))
    return replace(cost, request=request, step=cost.step + max(0.0, later - cost.decode_seconds(1, context)))


def _bench(words: list[str]) -> Measures:
    """Return the measures of one round of one load. Raises BenchError."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        results = runner.run(run_benchmark(parse_arguments(words), words, _tell))
    (measured,) = results.points[0].servers[0].rounds
    return measured


def _compare(trace: Path, given: argparse.Namespace, flags: Sequence[str], asked: Setup) -> Iterator[Line]:
    """All speeds of one trace, each on a server of its own: none finds the prompts of another in its cache."""
    rows = read_trace(trace, scale_length=float(given.scale_len))[: int(given.requests)]
    for speed in given.scale_rate.split(","):
        bench = ["--trace", str(trace), "--scale-rate", speed, "--scale-len", given.scale_len]
        bench += ["--requests", given.requests, "--repeat", "1", "--no-probe", "--", *flags]
        live = _bench(bench)
        yield from lines_of(trace.name, float(speed), live, report(simulate(asked, rows, speed=float(speed))))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def lines_of(trace: str, speed: float, live: Measures, simulated: Report) -> Iterator[Line]:
    """Yield a line for each statistic of a quantity that both the live and the simulated run have."""
    for quantity in _QUANTITIES:
        for statistic in _LIMITS:
            measured, guessed = (
                getattr(getattr(live, f"{quantity}_ms"), statistic),
                simulated.value(quantity, statistic),
            )
            if measured and guessed is not None:
                yield Line(
                    trace=trace,
                    speed=speed,
                    requests=live.ok,
                    quantity=quantity,
                    statistic=statistic,
                    live=measured / 1e3,
                    simulated=guessed,
                )


def print_lines(lines: Sequence[Line], console: Console | None = None) -> None:
    """A row for each, the misses marked."""
    console = console or Console(width=110)
    table = Table(title="Live and simulated, ms", title_justify="left")
    for column in ("trace", "speed", "requests", "quantity", "live", "simulated", "error", ""):
        table.add_column(column, justify="left" if column in {"trace", "quantity"} else "right")
    for line in lines:
        table.add_row(
            line.trace,
            f"{line.speed:g}",
            f"{line.requests:,}",
            f"{line.quantity} {line.statistic}",
            f"{1e3 * line.live:,.4g}",
            f"{1e3 * line.simulated:,.4g}",
            f"{line.error:+.1%}",
            "ok" if line.ok else "[red]MISSED[/red]",
        )
    console.print(table)
    for statistic, limit in _LIMITS.items():
        of = [line for line in lines if line.statistic == statistic]
        within = sum(line.ok for line in of)
        console.print(f"{statistic} within {limit:.0%}: {within} of {len(of)}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())

"""`quire simulate`: a load through the scheduler that serves, on a clock that a cost model moves.

Promises: exit code 0 when all went as expected, 1 when an objective is missed, 2 for flags and files
that cannot work.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

from rich.console import Console

from quire_bench.traces import TraceError, TraceRow, read_trace
from quire_engine.contract.errors import ConfigError
from quire_engine.cost_model import read_cost, seconds
from quire_engine.ranks import num_exchanges
from quire_lab.commands.planning.fleets import add_fleet_flags, refuse_fleet_flags, simulate_fleet
from quire_lab.commands.planning.shown import print_contiguous, print_report, print_static
from quire_lab.simulation.contiguous import simulate_contiguous
from quire_lab.simulation.lengths import exercise_setup, rows_of
from quire_lab.simulation.outcome import Outcome
from quire_lab.simulation.plotting import svg, terminal
from quire_lab.simulation.report import Report, compare, report
from quire_lab.simulation.setup import MATCH_NAMES, Setup, parse_settings, setup
from quire_lab.simulation.simulator import simulate
from quire_lab.simulation.slo import Slo, parse_slo
from quire_lab.simulation.static_batching import StaticOutcome, simulate_static
from quire_server.showing.terminal import (
    BAD_USAGE,
    DONE,
    FAILED,
    Parser,
    above_0,
    complain,
    duration,
    whole_number,
    wide_console,
)

DEFAULT_COST = "quire-calibration.json"
_EPILOG = f"""\
Steps take what the cost model says: --cost FILE of `quire calibrate` (default ./{DEFAULT_COST}), or numbers
such as step=20ms,row=0.2ms,context=0.1us,token=0.1ms, or unit: steps of one second, with no target
for gaps between tokens unless --set itl_target names one. With --lengths it is unit.

Published numbers are held against it by: python -m quire_lab.studies

examples:
  quire simulate --lengths 32,128,64,256 --arrivals 0,2,4,6 --compare static --plot
  quire simulate --trace AzureLLMInferenceTrace_conv.csv --scale-rate 0.5 --slo ttft_p95=2s,itl_p99=150ms
  quire simulate --trace conversation_trace.jsonl --set max_num_seqs=32 --json b.json --against a.json
  quire simulate --trace conversation_trace.jsonl --replicas 8 --route predicted_ttft,cache_aware,round_robin"""
_GARBAGE_EVERY = 100_000  # objects: a simulation makes many that live long

T = TypeVar("T", int, float)


def run(argv: Sequence[str]) -> int:
    """Simulate and print; the process's exit code."""
    given = build_parser().parse_args(argv)
    console = wide_console()
    gc.set_threshold(_GARBAGE_EVERY)
    try:
        return _simulate(given, console)
    except (ConfigError, TraceError) as error:
        return complain("simulate", str(error), BAD_USAGE)


def build_parser() -> argparse.ArgumentParser:
    """The command\'s own flags."""
    parser = Parser(
        prog="quire simulate",
        description="Run a load through the scheduler that serves, without a machine: what would happen if.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load = parser.add_argument_group("Load, one of").add_mutually_exclusive_group(required=True)
    load.add_argument("--trace", type=Path, metavar="FILE", help="Azure CSV, Mooncake jsonl, ServeGen JSON, or our own")
    load.add_argument("--lengths", type=_numbers(int), metavar="N,N,...", help="output tokens of single requests")
    load.add_argument("--check", type=_moved, help=argparse.SUPPRESS)
    shape = parser.add_argument_group("Its shape")
    shape.add_argument(
        "--arrivals", type=_numbers(float), default=[], metavar="S,S,...", help="of --lengths [all at 0]"
    )
    shape.add_argument("--prompt-tokens", type=int, default=1, metavar="N", help="of --lengths [1]")
    shape.add_argument("--requests", type=int, metavar="N", help="the first N of a trace [all]")
    shape.add_argument("--scale-len", type=above_0(), default=1.0, metavar="X", help="multiplies a trace's lengths [1]")
    shape.add_argument(
        "--scale-rate", type=above_0(), default=1.0, metavar="X", help="a trace runs X times as fast [1]"
    )
    shape.add_argument("--seed", type=int, default=0, help="of loads that are drawn [0]")
    shape.add_argument(
        "--max-tokens",
        type=whole_number,
        metavar="N",
        help="the limit that clients set; outputs end by a stop token, so that their lengths must be expected"
        " [each output's length]",
    )
    add_setup_flags(parser)
    parser.add_argument(
        "--prefix-match",
        choices=MATCH_NAMES,
        default="radix",
        help="how a cached prefix is found: only as a whole content, by whole blocks, or by tokens as this server does",
    )
    add_fleet_flags(parser)
    _add_size(parser)
    _add_output_flags(parser)
    return parser


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("Output")
    out.add_argument("--slo", type=str, metavar="LIST", help="objectives, such as ttft_p95=2s,itl_p99=150ms")
    out.add_argument(
        "--compare",
        choices=("static", "contiguous"),
        help="also the same load in static batches, or in memory without pages, its holes drawn",
    )
    out.add_argument(
        "--plot", nargs="?", const="-", metavar="FILE", help="used blocks over time here, and as SVG in FILE"
    )
    out.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers here")
    out.add_argument("--against", type=Path, metavar="FILE", help="compare with an earlier --json")


def _add_size(parser: argparse.ArgumentParser) -> None:
    """The flags of ranks and replicas."""
    parser.add_argument(
        "--ranks", type=whole_number, metavar="N", help="the server as N processes with the processors of one each"
    )
    parser.add_argument("--replicas", type=whole_number, metavar="N", help="a fleet instead of one server; see --route")
    parser.add_argument(
        "--prompt-replicas",
        type=whole_number,
        metavar="N",
        help="of the replicas: as nodes with --role prefill they compute prompts for the others; step level",
    )
    parser.add_argument(
        "--level",
        choices=("auto", "step", "coarse", "both"),
        default="auto",
        help="the scheduler in each replica, or a queue and an LRU fitted to it; auto: step up to 16 replicas",
    )


def add_setup_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a simulated server, which several commands share."""
    what = parser.add_argument_group("Server")
    what.add_argument("--cost", metavar="FILE", help=f"what steps take; see below [{DEFAULT_COST}]")
    what.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a limit of the scheduler, the pool or the queue, such as max_num_seqs=32 or num_blocks=4096; repeatable",
    )
    what.add_argument("--layers", type=whole_number, default=32, metavar="L", help="of the model, for --ranks [32]")
    what.add_argument(
        "--gather", type=_time, default=2e-6, metavar="TIME", help="of one exchange between ranks, for --ranks [2us]"
    )


def asked_setup(given: argparse.Namespace) -> Setup:
    """The server that the flags describe. Raises ConfigError."""
    cost, plain = read_cost(given.cost or DEFAULT_COST)
    return of_ranks(setup(plain, cost).with_settings(parse_settings(given.set)), given)


def of_ranks(one: Setup, given: argparse.Namespace, *, pools: bool = False) -> Setup:
    """The server as so many ranks as the flags say. `pools`: each brings the memory of a whole server."""
    return one.of_ranks(given.ranks or 1, num_exchanges(given.layers), given.gather, pools=pools)


def asked_trace(given: argparse.Namespace) -> tuple[TraceRow, ...]:
    """The rows that the flags name. Raises TraceError, ConfigError."""
    if given.requests is not None and given.requests < 1:
        raise ConfigError("--requests must be at least 1")
    return read_trace(given.trace, scale_length=given.scale_len, seed=given.seed)[: given.requests]


def _check_fleet(given: argparse.Namespace) -> None:
    """Refuse flags that a fleet does not read. Raises ConfigError."""
    if given.trace is None:
        raise ConfigError("--replicas needs a --trace")
    if given.prefix_match != "radix":
        raise ConfigError("--prefix-match works without --replicas only")
    for name in ("compare", "against", "max_tokens"):
        if getattr(given, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} works without --replicas only")


def _simulate(given: argparse.Namespace, console: Console) -> int:
    slo = parse_slo(given.slo) if given.slo else Slo()
    if given.lengths is not None:
        rows = rows_of(given.lengths, given.arrivals, prompt_tokens=given.prompt_tokens)
        asked = exercise_setup(rows)
        if given.cost:
            asked = setup({}, read_cost(given.cost)[0]).with_settings(asked.settings().items())
        asked = of_ranks(asked.with_settings(parse_settings(given.set)), given)
    else:
        rows, asked = asked_trace(given), asked_setup(given)
    asked = replace(asked, prefix_match=given.prefix_match)
    if given.replicas is not None:
        _check_fleet(given)
        return simulate_fleet(given, rows, asked, slo, console)
    refuse_fleet_flags(given, "--replicas")
    if given.prompt_replicas is not None:
        raise ConfigError("--prompt-replicas needs --replicas")
    if given.max_tokens is not None:
        rows = tuple(replace(row, max_tokens=given.max_tokens) for row in rows)
    earlier = _earlier(given.against)
    started = time.perf_counter()
    outcome = simulate(asked, rows, speed=given.scale_rate)
    took = time.perf_counter() - started
    found = report(outcome, slo)
    name = "lengths" if given.trace is None else given.trace.name
    print_report(f"{name}, simulated", found, console)
    if given.lengths is not None:
        ends = "/".join(f"{one.ended_step}" for one in outcome.requests)
        console.print(f"{'finish':<14}after steps {ends}", highlight=False)
    static: StaticOutcome | None = None
    if given.compare == "contiguous":
        print_contiguous(simulate_contiguous(asked, rows, speed=given.scale_rate), found, console)
    if given.compare == "static":
        static = simulate_static(asked, rows, speed=given.scale_rate)
        print_static(static, found, console)
    if earlier is not None:
        _print_comparison(earlier, found, console)
    if given.plot:
        _plot(given.plot, outcome, name, static, console)
    if given.json is not None:
        _write(given.json, found, asked, given)
    console.print(
        f"{len(rows):,} requests simulated in {duration(took)}: {len(rows) / max(took, 1e-9):,.0f} a second",
        highlight=False,
    )
    return FAILED if found.misses else DONE


def _plot(where: str, outcome: Outcome, name: str, static: StaticOutcome | None, console: Console) -> None:
    for line in terminal(outcome):
        console.print(line, highlight=False, markup=False)
    if where != "-":
        blocks = None if static is None else static.outcome.peak_blocks
        try:
            Path(where).write_text(svg(outcome, title=f"KV blocks, {name}", static_blocks=blocks), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot {where} cannot be written: {error.strerror}") from None


def _write(path: Path, found: Report, asked: Setup, given: argparse.Namespace) -> None:
    plain = {
        "report": found.as_plain(),
        "settings": asked.settings(),
        "cost": asked.cost.as_plain(),
        "load": {
            "trace": str(given.trace or ""),
            "scale_rate": given.scale_rate,
            "scale_len": given.scale_len,
            "max_tokens": given.max_tokens,
            "prefix_match": given.prefix_match,
        },
    }
    try:
        path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from None


def _earlier(path: Path | None) -> dict[str, object] | None:
    if path is None:
        return None
    try:
        plain = json.loads(path.read_bytes())["report"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--against {path} is no --json of an earlier run: {error}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"--against {path} is no --json of an earlier run")
    return plain


def _print_comparison(earlier: dict[str, object], found: Report, console: Console) -> None:
    console.print("Against the earlier run:")
    for one in compare(earlier, found.as_plain()):
        change = "" if one.ratio is None else f"  x{one.ratio:.3g}"
        console.print(f"  {one.name:<22}{one.before:>14.6g} -> {one.after:.6g}{change}", highlight=False)


def _time(text: str) -> float:
    try:
        return seconds(text, "the time")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _moved(text: str) -> NoReturn:
    name = "" if text == "all" else f" {text}"
    raise argparse.ArgumentTypeError(f"published numbers are compared by `python -m quire_lab.studies{name}`")


def _numbers(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        try:
            return [kind(word) for word in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected numbers such as 32,128, got {text!r}") from None

    return parse

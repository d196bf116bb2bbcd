"""`quire plan`: computes the memory of KV caches, or the settings with the highest rate within objectives.

Promises: exit code 0 with an answer, 1 when no settings meet the objectives, 2 for flags and files that cannot work.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from quire_bench.traces import TraceError
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.cost_model import read_cost
from quire_engine.demo import demo_model_path
from quire_lab.commands.planning.fleets import add_fleet_flags, print_fleet_plan, refuse_fleet_flags
from quire_lab.commands.planning.kv_plan import add_kv_flags, print_kv
from quire_lab.commands.planning.plan_section import Circumstances, section, write
from quire_lab.commands.simulate import DEFAULT_COST, add_setup_flags, asked_trace, of_ranks
from quire_lab.simulation.fitting import FitError
from quire_lab.simulation.search import Search, default_grid
from quire_lab.simulation.setup import parse_settings, setup
from quire_lab.simulation.slo import parse_slo
from quire_server.checkpoint.locate import checkpoint_directory
from quire_server.settings import DEMO_MODEL, REMOVED, removed_line
from quire_server.showing.terminal import BAD_USAGE, DONE, FAILED, Parser, above_0, complain, wide_console

_EPILOG = f"""\
Steps take what --cost says: a file of `quire calibrate` (default ./{DEFAULT_COST}), or numbers.

examples:
  quire plan --kv --model /models/Qwen3-0.6B --memory 60GB --prefix 200 --sessions 16
  quire plan --slo ttft_p95=2s,itl_p99=150ms --trace AzureLLMInferenceTrace_conv.csv --requests 600 \\
      --write SERVING.md
  quire plan --fleet --slo ttft_p95=5s --trace conversation_trace.jsonl --copies 4 --route predicted_ttft,round_robin"""


def run(argv: Sequence[str]) -> int:
    """Plan and print; the process's exit code."""
    given = build_parser().parse_args(argv)
    console = wide_console()
    try:
        if given.kv:
            folder = (
                demo_model_path() if given.model == DEMO_MODEL else checkpoint_directory(given.model, weights=False)
            )
            return print_kv(given, folder, console)
        if not given.slo or given.trace is None:
            raise ConfigError("give --kv, or --slo with --trace")
        if given.fleet:
            cost, plain = read_cost(given.cost or DEFAULT_COST)
            base = setup(plain, cost).with_settings(parse_settings(given.set))
            ranks = of_ranks(base, given, pools=True) if given.ranks else None
            return print_fleet_plan(given, asked_trace(given), base, ranks, parse_slo(given.slo), console)
        return _search(given, argv, console)
    except (ConfigError, ModelLoadError, TraceError) as error:
        return complain("plan", str(error), BAD_USAGE)


def build_parser() -> argparse.ArgumentParser:
    """The command\'s own flags."""
    parser = Parser(
        prog="quire plan",
        description="Plan a server before it runs: the memory of its KV cache, or the settings for a load.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_kv_flags(parser, DEMO_MODEL)
    load = parser.add_argument_group("Settings for a load")
    load.add_argument("--slo", metavar="LIST", help="objectives, such as ttft_p95=2s,itl_p99=150ms")
    load.add_argument("--trace", type=Path, metavar="FILE", help="Azure CSV, Mooncake jsonl, ServeGen JSON, or our own")
    load.add_argument("--requests", type=int, metavar="N", help="the first N of the trace [all]")
    load.add_argument(
        "--scale-len", type=above_0(), default=1.0, metavar="X", help="multiplies the trace's lengths [1]"
    )
    load.add_argument("--seed", type=int, default=0, help="of the choice of candidates, and of drawn loads [0]")
    load.add_argument("--candidates", type=int, default=24, metavar="N", help="combinations of settings to try [24]")
    load.add_argument(
        "--try",
        dest="tries",
        action="append",
        default=[],
        metavar="NAME=V,V,...",
        help="values of a setting to try instead of those around its own; repeatable",
    )
    add_setup_flags(parser)
    load.add_argument("--fleet", action="store_true", help="the fewest replicas for the objectives instead")
    load.add_argument(
        "--roles", action="store_true", help="also whether --role prefill and decode pay on this trace; for --fleet"
    )
    load.add_argument("--replica-cost", type=above_0(), default=1.0, metavar="X", help="of a replica and hour [1]")
    add_fleet_flags(parser)
    out = parser.add_argument_group("Output")
    out.add_argument("--write", type=Path, metavar="FILE", help="put the plan into its section of this Markdown file")
    out.add_argument("--json", type=Path, metavar="FILE", help="also write the whole plan here")
    return parser


def _search(given: argparse.Namespace, argv: Sequence[str], console: Console) -> int:
    gc.set_threshold(100_000)
    refuse_fleet_flags(given, "--fleet")
    if given.roles:
        raise ConfigError("--roles needs --fleet")
    slo, rows = parse_slo(given.slo), asked_trace(given)
    cost, plain = read_cost(given.cost or DEFAULT_COST)
    fit_error = FitError.from_plain(plain["fit_error"]) if "fit_error" in plain else None
    base = of_ranks(setup(plain, cost).with_settings(parse_settings(given.set)), given)
    if given.candidates < 1:
        raise ConfigError("--candidates must be at least 1")
    grid = default_grid(base)
    for name, values in parse_settings(given.tries):
        key = name.lstrip("-").replace("-", "_")
        if key in REMOVED:  # what is planned is to be set
            raise ConfigError(removed_line(f"--try {name}", key))
        grid[key] = tuple(base.with_settings([(key, value)]).settings()[key] for value in str(values).split(","))
        own = base.settings()[key]
        if own not in grid[key]:
            grid[key] = (own, *grid[key])
    search = Search(base, rows, slo, tell=lambda line: print(line, file=sys.stderr, flush=True))
    try:
        plan = search.run(grid, candidates=given.candidates, seed=given.seed)
    except ConfigError as error:
        return complain("plan", str(error), FAILED)
    about = Circumstances(
        slo=slo,
        trace=given.trace.name,
        date=time.strftime("%Y-%m-%d"),
        machine=cost.origin,
        error=fit_error,
        command=shlex.join(["quire", "plan", *argv]),
    )
    text = section(plan, about)
    console.print(text, highlight=False, markup=False)
    if given.json is not None:
        told = {"fit_error": None if fit_error is None else fit_error.as_plain()}
        given.json.write_text(json.dumps(asdict(plan) | told, indent=1) + "\n", encoding="utf-8")
    if given.write is not None:
        changed = write(given.write, text)
        print(f"written to {given.write}" if changed else f"{given.write} says so already", file=sys.stderr)
    return DONE

"""`quire replay`: replays a recorded step log through the scheduler, unchanged or with other settings.

Promises: exit code 0 when the plans are the same, 1 when they are not, 2 for flags and files that cannot work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire_engine.contract.errors import ConfigError
from quire_engine.cost_model import read_cost
from quire_lab.simulation.counterfactual import (
    BASE_TOLERANCE,
    BaseFigure,
    Measured,
    base_figures,
    fitted_cost,
    load_of,
    measured,
)
from quire_lab.simulation.recorded import Recording, read_log
from quire_lab.simulation.replaying import replay
from quire_lab.simulation.report import Report, report
from quire_lab.simulation.setup import Setup, parse_settings
from quire_lab.simulation.simulator import simulate
from quire_server.showing.terminal import BAD_USAGE, DONE, FAILED, Parser, complain, duration, wide_console

_MOST_SHOWN = 600  # characters of each side of a difference


def run(argv: Sequence[str]) -> int:
    """Replay and print; the process's exit code."""
    given = build_parser().parse_args(argv)
    console = wide_console()
    try:
        recording = read_log(given.log)
        if recording.unknown_settings:
            names = ", ".join(recording.unknown_settings)
            console.print(f"settings that this version's scheduler does not have are left out: {names}")
        if given.set or given.cost:
            return _counterfactual(recording, given, console)
        return _identity(recording, console)
    except ConfigError as error:
        return complain("replay", str(error), BAD_USAGE)


def build_parser() -> argparse.ArgumentParser:
    """The command\'s own flags."""
    parser = Parser(
        prog="quire replay",
        description="Make the recorded calls again on a scheduler of the recorded configuration and compare all plans."
        " With --set: the recorded load under other settings, beside the recorded ones, both simulated.",
        epilog="A log is what `quire trace --json > LOG` writes; its ring must still have had its first step.",
        allow_abbrev=False,
    )
    parser.add_argument("--log", type=Path, required=True, metavar="FILE", help="JSON lines of a step log")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="what if: such as max_num_seqs=32; repeatable"
    )
    parser.add_argument("--cost", metavar="FILE", help="what steps take [fitted to the steps of the log]")
    return parser


def _identity(recording: Recording, console: Console) -> int:
    try:
        found = replay(recording)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if found.difference is None:
        console.print(
            f"the same plans: {found.steps:,} steps of {found.requests:,} requests, slices, copies, blocks and queues",
            highlight=False,
        )
        return DONE
    different = found.difference
    if recording.restored_blocks:
        console.print(
            f"perhaps because the server began with {recording.restored_blocks:,} blocks of an earlier run, whose"
            " contents are not in the log"
        )
    console.print(f"[red]step {different.step_id} differs[/red] in {different.what}, after {found.steps:,} equal ones")
    for side, value in (("recorded", different.recorded), ("replayed", different.replayed)):
        console.print(f"  {side}  {str(value)[:_MOST_SHOWN]}", highlight=False, markup=False)
    return FAILED


def _counterfactual(recording: Recording, given: argparse.Namespace, console: Console) -> int:
    cost = read_cost(given.cost)[0] if given.cost else fitted_cost(recording)
    rows = load_of(recording)
    as_recorded = replace(Setup(cost=cost), scheduler=recording.config, max_num_queued_reqs=len(rows))
    changed = as_recorded.with_settings(parse_settings(given.set))
    before, after = report(simulate(as_recorded, rows)), report(simulate(changed, rows))
    known = measured(recording)
    print_beside(known, before, after, ", ".join(given.set) or "unchanged", console)
    warn_of_base(base_figures(known, before), console)
    return DONE


def print_beside(known: Measured, before: Report, after: Report, what: str, console: Console) -> None:
    """The recorded settings and the others, both simulated; what was measured to judge the simulation by."""
    table = Table(title=f"{before.served:,} recorded requests", title_justify="left")
    table.add_column("")
    for column in ("measured", "simulated", what, "ratio"):
        table.add_column(column, justify="right")
    for quantity in ("ttft", "itl", "e2e", "queue"):
        for statistic in ("p50", "p95", "p99"):
            old, new = before.value(quantity, statistic), after.value(quantity, statistic)
            live = getattr(getattr(known, quantity, None), statistic, None)
            ratio = f"{new / old:.3g}" if old and new is not None else "-"
            table.add_row(f"{quantity} {statistic}", duration(live), duration(old), duration(new), ratio)
    for name in ("preemptions", "peak_blocks", "steps"):
        live, old, new = (getattr(one, name) for one in (known, before, after))
        ratio = f"{new / old:.3g}" if old else "-"
        table.add_row(name.replace("_", " "), f"{live:,}", f"{old:,}", f"{new:,}", ratio)
    console.print(table)


def warn_of_base(figures: Sequence[BaseFigure], console: Console) -> None:
    """Say by how much the simulation of the recorded settings misses the recorded run, if it does."""
    wrong = [one for one in figures if one.differs]
    if not wrong:
        return
    console.print(
        "[yellow]warning[/yellow]: the simulated base is not the recorded run:"
        f" more than {BASE_TOLERANCE:.0%} apart in",
        highlight=False,
    )
    for one in wrong:
        recorded, simulated = (
            duration(value) if one.is_time else f"{value:,.0f}" for value in (one.recorded, one.simulated)
        )
        change = f" ({one.simulated / one.recorded - 1:+.0%})" if one.recorded else ""
        console.print(f"  {one.name}: {recorded} recorded, {simulated} simulated{change}", highlight=False)
    console.print(
        "compare the other settings with the simulated column alone, and trust their ratio no further than that"
    )

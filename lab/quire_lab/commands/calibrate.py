"""`quire calibrate`: measures what steps take on this machine, for `quire simulate` and `quire plan`.

Promises: exit code 0 when a file was written, 1 when the model cannot be measured or the error on held-out steps is too
large, 2 for flags that cannot work. Must not know: torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from quire_engine.contract.errors import ConfigError, QuireError
from quire_engine.cost_model import cost_model, knees
from quire_lab.commands.simulate import DEFAULT_COST
from quire_lab.simulation.fitting import LARGEST_ERROR, FitError
from quire_server.checkpoint.locate import localized
from quire_server.engine.json_child import ask
from quire_server.flags import parse_flags
from quire_server.settings import SettingsError
from quire_server.showing.terminal import (
    BAD_USAGE,
    DONE,
    FAILED,
    Parser,
    above_0,
    complain,
    duration,
    wide_console,
)

_PATIENCE = 900.0  # seconds beside the measuring: a large model may have to be loaded


def run(argv: Sequence[str]) -> int:
    """Measure, print and write; the process's exit code."""
    words = list(argv)
    split = words.index("--") if "--" in words else len(words)
    given = build_parser().parse_args(words[:split])
    if not given.out.absolute().parent.is_dir():
        return complain("calibrate", f"{given.out} cannot be written: there is no such directory", BAD_USAGE)
    try:
        settings = localized(parse_flags(words[split + 1 :]))
        question = {"config": asdict(settings.engine_config()), "seconds": given.seconds}
        print(f"measuring for {given.seconds:g} s; nothing else should run meanwhile", file=sys.stderr)
        longest = given.seconds * 4 + _PATIENCE
        (found,) = ask("calibrate", question, dict[str, Any], timeout=longest, package="quire_lab.tools")
    except (SettingsError, ConfigError) as error:
        return complain("calibrate", str(error), BAD_USAGE)
    except QuireError as error:
        return complain("calibrate", str(error), FAILED)
    queue = {name: getattr(settings, name) for name in ("max_num_queued_reqs", "max_num_queued_tokens")}
    found["settings"].update(queue)
    print_calibration(found, wide_console())
    fit_error = FitError.from_plain(found["fit_error"])
    if fit_error.largest > LARGEST_ERROR and not given.force:
        reason = (
            f"{fit_error}, more than {LARGEST_ERROR:.0%}: what else runs here delays the steps, or --seconds is short"
        )
        return complain("calibrate", f"nothing is written: {reason}; --force writes {given.out} all the same", FAILED)
    given.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    print(f"written to {given.out}")
    return DONE


def build_parser() -> argparse.ArgumentParser:
    """The command\'s own flags."""
    parser = Parser(
        prog="quire calibrate",
        usage="quire calibrate [flags] [-- flags of quire serve]",
        description="Measure what steps take on this machine, for `quire simulate` and `quire plan`: decodes over batch"
        " sizes and contexts, prompts over chunk sizes, with a fifth of the steps held out to tell the error.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--seconds", type=above_0("seconds", most=86400), default=60.0, metavar="S", help="time to measure [60]"
    )
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_COST), metavar="FILE", help=f"[{DEFAULT_COST}]")
    parser.add_argument(
        "--force",
        action="store_true",
        help=f"write also with a mean error above {LARGEST_ERROR:.0%}% on held-out steps",
    )
    return parser


def print_calibration(found: dict[str, Any], console: Console) -> None:
    """Print the cost model and its error."""
    cost, error = cost_model(found["cost"]), found["fit_error"]
    console.print(
        f"a step without prompts: {duration(cost.step)} + {duration(cost.row)} for each decode"
        f" + {duration(1000 * cost.context)} for each 1,000 tokens looked at",
        highlight=False,
    )
    table = Table(title="A step with prompts", title_justify="left")
    for column in ("tokens", "time", "tokens/s", "knee"):
        table.add_column(column, justify="right")
    bends = knees(cost.prompt)
    for tokens, seconds in cost.prompt:
        mark = "more cost more" if tokens in bends else ""
        table.add_row(f"{tokens:,}", duration(seconds), f"{tokens / seconds:,.0f}", mark)
    console.print(table)
    back = duration(1e6 * cost.chunk_context)
    console.print(f"and {back} for each 1,000 tokens of a chunk that look at 1,000 before it", highlight=False)
    for kind in ("decode", "prompt"):
        console.print(
            f"error on {error[f'{kind}_steps']:,} {kind} steps held out: median {error[f'{kind}_median']:.1%}, mean"
            f" {error[f'{kind}_mean']:.1%}",
            highlight=False,
        )

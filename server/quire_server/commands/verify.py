"""`quire verify`: checks that the kernels that would serve compute correctly on this machine.

Promises: exit code 0 if all checks pass, 1 if one fails or the checks cannot run, 2 for invalid flags. Must not know:
torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quire_engine.contract.config import Device, KernelChoice
from quire_engine.contract.errors import QuireError
from quire_server.checkpoint.locate import checkpoint_directory
from quire_server.engine.json_child import ask
from quire_server.settings import DEMO_MODEL
from quire_server.showing.terminal import BAD_USAGE, DONE, FAILED, Parser, complain, whole_number, wide_console

PATIENCE = 60.0  # seconds for one check
LONGEST = 900.0  # seconds for all checks, if the process does not end itself
MOST_PROBLEMS = 20  # most problems that are printed; the JSON has all
MEANING = (
    "Tolerance: the greatest error as a share of what the roundings of the types involved allow; above 1 is a failure."
    " Alone: whether a row computed alone has the same bits as in a batch; on a GPU this is for information, but with"
    " --deterministic."
)


class Check(msgspec.Struct):
    """One line of the report."""

    kernels: str
    dtype: str
    weights: str
    kv: str
    op: str
    case: str
    ok: bool
    share: float
    alone: bool | None
    problem: str
    fatal: bool


class Greedy(msgspec.Struct):
    """The embedded model's answers."""

    ok: bool
    kernels: str
    num_tokens: int
    num_equal: int
    problem: str


class Report(msgspec.Struct):
    """The checking process's reply, also the output of `--json`."""

    ok: bool
    when: str
    seconds: float
    device: str
    deterministic: bool
    model: str
    machine: dict[str, Any]
    checks: list[Check]
    greedy: Greedy | None


def run(argv: Sequence[str]) -> int:
    """Check, print the report and return the process's exit code."""
    given = build_parser().parse_args(argv)
    if given.json is not None and not given.json.absolute().parent.is_dir():
        return complain("verify", f"{given.json} cannot be written: there is no such directory", BAD_USAGE)
    try:
        question = {
            "device": given.device,
            "kernels": given.kernels,
            "deterministic": given.deterministic,
            "model": _model(given.model),
            "num_threads": given.num_threads,
            "patience": PATIENCE,
        }
        (report,) = ask("verify", question, Report, timeout=LONGEST)
    except QuireError as error:
        return complain("verify", str(error), FAILED)
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    print_report(report)
    return DONE if report.ok else FAILED


def build_parser() -> argparse.ArgumentParser:
    """The command\'s own flags."""
    parser = Parser(
        prog="quire verify",
        description="Check every operation of the kernels that would serve against the reference on this machine, in"
        " batches of many sizes, and the embedded model's answers against those recorded on a CPU.",
    )
    parser.add_argument("--device", choices=get_args(Device), default="auto", help="default: a GPU where there is one")
    parser.add_argument("--kernels", choices=get_args(KernelChoice), default="auto", help="default: what would serve")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="what serves with this flag; rows alone are then held to their bits",
    )
    parser.add_argument(
        "--model", default=DEMO_MODEL, metavar="DIR", help="checkpoint whose sizes are checked; no weight is read"
    )
    parser.add_argument("--num-threads", type=whole_number, help="compute threads; default: one for each usable core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results here, to be sent")
    return parser


def _model(given: str) -> str | None:
    """The model's directory; None for the embedded model. Raises ModelLoadError."""
    if given == DEMO_MODEL:
        return None
    return str(checkpoint_directory(given))


def print_report(report: Report, console: Console | None = None) -> None:
    """One table, what is wrong, and the verdict."""
    console = wide_console(console)
    console.print(_table(report))
    console.print(MEANING, highlight=False)
    failed = [check for check in report.checks if not check.ok]
    for check in failed[:MOST_PROBLEMS]:
        console.print(
            f"[red]FAILED[/red] {escape(_set(check))}: {check.op}, {escape(check.case)}: {escape(check.problem)}"
        )
    if len(failed) > MOST_PROBLEMS:
        console.print(f"and {len(failed) - MOST_PROBLEMS:,} more failures; --json FILE has all")
    if report.greedy is not None and report.greedy.problem:
        console.print(f"[red]FAILED[/red] the embedded model: {escape(report.greedy.problem)}")
    if reason := report.machine.get("why_no_gpu"):
        console.print(f"no GPU was used: {escape(str(reason))}")
    verdict = "all is as it should be" if report.ok else "this machine does not compute what it should"
    console.print(
        f"{verdict}: {len(report.checks):,} checks on {_where(report)} in {report.seconds:g} s", highlight=False
    )


def _table(report: Report) -> Table:
    """The table's rows, one for each op of each set and format."""
    table = Table(title=f"The sizes of {report.model} on {_where(report)}", title_justify="left")
    for title in ("kernels", "op"):
        table.add_column(title)
    for title in ("checks", "tolerance", "alone", ""):
        table.add_column(title, justify="right")
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in report.checks:
        groups.setdefault((_set(check), check.op), []).append(check)
    shown = ""
    for (name, op), checks in groups.items():
        if shown and name != shown:
            table.add_section()
        alone = [check.alone for check in checks if check.alone is not None]
        table.add_row(
            "" if name == shown else name,
            op,
            f"{len(checks):,}",
            f"{max(check.share for check in checks):.2f}",
            "" if not alone else "same" if all(alone) else "differs",
            "ok" if all(check.ok for check in checks) else "[red]FAILED[/red]",
        )
        shown = name
    if report.greedy is not None:
        greedy = report.greedy
        table.add_section()
        equal = f"{greedy.num_equal:,} of {greedy.num_tokens:,}"
        verdict = "ok" if greedy.ok else "[red]FAILED[/red]"
        table.add_row(greedy.kernels or "none", "greedy answers of quire-demo", "tokens", equal, "", verdict)
    return table


def _set(check: Check) -> str:
    weights = "" if check.weights == "auto" else f", {check.weights} weights"
    return f"{check.kernels}, {check.dtype}{weights}{'' if check.kv == 'auto' else f', {check.kv} KV'}"


def _where(report: Report) -> str:
    gpus = report.machine.get("gpus") or []
    if report.device != "cuda" or not gpus:
        return f"{report.machine['processor']}, {report.machine['cores']} cores"
    gpu = gpus[0]
    return f"{gpu['name']} ({gpu['capability']}, driver {report.machine['gpu_driver']})"

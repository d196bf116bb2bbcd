"""Studies by simulation: python -m quire_lab.studies [s1.3 v7 ...] [--data DIR].

Promises: exit code 0 when all agree, 1 when one does not, 2 for arguments and files that cannot work.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire_engine.contract.errors import ConfigError
from quire_lab.studies.admission import compare, table
from quire_lab.studies.published import EXERCISES, WITH_DATA, Check

ADMISSION = "admission"
_ADMISSION_TEXT = "admission by expected growth against admission by the prompt, on loads that fill the pool"
DONE, FAILED, BAD_USAGE = 0, 1, 2
_WIDTH = 110  # where there is no terminal
_GARBAGE_EVERY = 100_000  # objects: a simulation makes many that live long
_EPILOG = """\
Whole traces: v3 reads FAST25-release/traces/{conversation,synthetic}_trace.jsonl of kvcache-ai/Mooncake;
v4 reads fair_bench results of Ying1123/VTC-artifact as CSV files with the columns
client,req_time_s,prompt_len,output_len."""


def main(argv: Sequence[str]) -> int:
    """Compute, compare and print; the process's exit code."""
    parser = _parser()
    given = parser.parse_args(argv)
    if unknown := [name for name in given.names if name not in _listed()]:
        parser.error(f"there is no study {', '.join(unknown)}; --help lists them")
    gc.set_threshold(_GARBAGE_EVERY)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    ok = True
    try:
        for name in given.names or EXERCISES:
            text, checks = _done(name, given.data, console)
            print_checks(f"{name}: {text}", checks, console)
            ok = ok and all(check.ok for check in checks)
    except ConfigError as error:
        print(f"quire_lab.studies: {error}", file=sys.stderr)
        return BAD_USAGE
    return DONE if ok else FAILED


def _listed() -> dict[str, str]:
    """Return what each study is about, by name."""
    return {name: text for name, (text, _) in (EXERCISES | WITH_DATA).items()} | {ADMISSION: _ADMISSION_TEXT}


def _done(name: str, data: Path, console: Console) -> tuple[str, list[Check]]:
    """Do a study; return what it is about, and its numbers. Raises ConfigError where its data is missing."""
    if name == ADMISSION:
        runs, checks = compare()
        console.print(table(runs))
        return _ADMISSION_TEXT, checks
    if name in EXERCISES:
        text, compute = EXERCISES[name]
        return text, compute()
    text, compute_with = WITH_DATA[name]
    return text, compute_with(data)


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<11}{text}" for name, text in _listed().items())
    parser = argparse.ArgumentParser(
        prog="python -m quire_lab.studies",
        description="Compare published numbers with those of the scheduler that serves, on a simulated clock.",
        epilog=f"studies:\n{listed}\n\n{_EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="STUDY", help=f"which [{' '.join(EXERCISES)}]")
    parser.add_argument("--data", type=Path, default=Path(), metavar="DIR", help="where the whole traces lie [.]")
    return parser


def print_checks(title: str, checks: Sequence[Check], console: Console) -> None:
    """Expected and got, line by line."""
    table = Table(title=title, title_justify="left")
    table.add_column("number")
    for column in ("expected", "got", ""):
        table.add_column(column, justify="right")
    for check in checks:
        tolerance = f" ± {check.tolerance:.3g}" if check.tolerance else ""
        table.add_row(
            check.name,
            f"{check.expected:.6g}{check.unit}{tolerance}",
            f"{check.got:.6g}{check.unit}",
            "ok" if check.ok else "[red]DIFFERS[/red]",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

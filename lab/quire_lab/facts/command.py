"""A command of checks against a live server: which of them, on whom, and the table of what was expected and what came.

Promises: exit code 0 when all agree that this server can show, 1 when one does not or could not be checked, 2 for
arguments that cannot work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire_bench.servers import BenchError
from quire_lab.facts.fact import Fact, NotShown, not_shown
from quire_lab.facts.live import Live

DONE, FAILED, BAD_USAGE = 0, 1, 2
Checks = Mapping[tuple[str, ...], Callable[[Live], list[Fact]]]  # by the names of what each checks


class CheckCommand:
    """The flags that such commands share, and what they do with them."""

    def __init__(self, program: str, *, about: str, one: str, known: Iterable[str]) -> None:
        """`one` is what a single check is called, `known` the names that there are."""
        self._one, self._known = one, list(known)
        self.parser = argparse.ArgumentParser(prog=program, description=about)
        listed = f"which: {', '.join(self._known)}; default: all"
        self.parser.add_argument("names", nargs="*", type=str.upper, metavar=one.upper(), help=listed)
        self.parser.add_argument(
            "--url", default="http://127.0.0.1:8000", help="a server that does nothing else meanwhile"
        )
        self.parser.add_argument("--api-key", default="", help="key that the server asks clients for")
        self.parser.add_argument(
            "--admin-api-key", default="", help="key that it asks operators for; none on its own machine"
        )
        self.parser.add_argument("--model", type=Path, help="the served checkpoint, to compare its config's sizes")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse what is asked for; unknown names end the process with code 2."""
        asked = self.parser.parse_args(argv)
        if unknown := [name for name in asked.names if name not in self._known]:
            self.parser.error(f"there is no check of {', '.join(unknown)}; known are {', '.join(self._known)}")
        return asked

    def carry_out(self, asked: argparse.Namespace, checks: Checks) -> int:
        """Check and print; the process's exit code."""
        try:
            live = Live(asked.url, api_key=asked.api_key, admin_key=asked.admin_api_key)
        except BenchError as error:
            print(f"{self.parser.prog}: {error}", file=sys.stderr)
            return FAILED
        facts = run_checks(live, checks, asked.names)
        table = Table(self._one, "expected", "got", "")
        for fact in facts:
            table.add_row(fact.name, fact.expected, fact.got, fact.verdict)
        Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)
        return DONE if all(fact.ok for fact in facts) else FAILED


def run_checks(live: Live, checks: Checks, wanted: Sequence[str]) -> list[Fact]:
    """The facts with these names, or all; one that cannot be checked is one that does not hold."""
    facts: list[Fact] = []
    for names, check in checks.items():
        if wanted and not set(names) & set(wanted):
            continue
        try:
            live.until_idle()
            facts += check(live)
        except NotShown as reason:
            facts.append(not_shown("/".join(names), str(reason)[:160]))
        except BenchError as error:
            facts.append(Fact(name="/".join(names), expected="an answer", got=str(error)[:160], ok=False))
    return facts

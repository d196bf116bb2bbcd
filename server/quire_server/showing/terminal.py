"""The commands' common behaviour at a terminal: exit codes, flags, complaints of one line, wide tables, times.

Promises: a flag that cannot work ends the process with code 2 and one line.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console

DONE, FAILED, BAD_USAGE = 0, 1, 2
WIDTH = 110  # where there is no terminal


class Parser(argparse.ArgumentParser):
    """A command's parser of flags, whose complaints are one line that begins with `prog`."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_USAGE, f"{self.prog}: {message}\n")


def above_0(what: str = "a number", most: float = math.inf) -> Callable[[str], float]:
    """The type of a flag that takes a finite number above 0, and not above `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not (0 < value <= most and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"expected {what} above 0, got {text!r}")
        return value

    return parse


def whole_number(text: str) -> int:
    """The type of a flag that takes a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text!r}")
    return int(text)


def complain(command: str, message: str, code: int) -> int:
    """Say on stderr what is wrong; returns the exit code."""
    for line in message.splitlines():
        print(f"quire {command}: {line}", file=sys.stderr)
    return code


def wide_console(console: Console | None = None) -> Console:
    """One on which tables are not squeezed."""
    console = console or Console()
    return console if console.is_terminal else Console(file=console.file, width=max(WIDTH, console.width))


def duration(seconds: float | None) -> str:
    """Three significant digits in a unit that fits."""
    if seconds is None:
        return "-"
    factor, unit = next(
        ((factor, unit) for factor, unit in ((1.0, "s"), (1e3, "ms")) if abs(seconds) * factor >= 0.9995), (1e6, "us")
    )
    value = seconds * factor
    return f"{value:,.0f} {unit}" if abs(value) >= 999.5 else f"{value:.3g} {unit}"

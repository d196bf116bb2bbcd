"""`quire serve`: imports the server only after the command line is parsed, so that `--help` and errors are fast."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from quire_server.flags import SERVE, parse_command_line
from quire_server.flags import build_parser as parser_of
from quire_server.settings import SettingsError

BAD_USAGE = 2


def run(argv: Sequence[str]) -> int:
    """Serve until a signal; the process's exit code."""
    try:
        given = parse_command_line(argv)
    except SettingsError as error:
        for line in error.lines:
            print(f"quire serve: {line}", file=sys.stderr)
        return BAD_USAGE
    from quire_server.programs import launch  # noqa: PLC0415 - slow, and `--help` does not need it

    return launch.run(given)


def build_parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    return parser_of(SERVE)

"""`quire engine`: a node, whose engine computes for servers on other machines; it imports little before its flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from quire_server.flags import ENGINE, parse_command_line
from quire_server.flags import build_parser as parser_of
from quire_server.settings import SettingsError

BAD_USAGE = 2


def run(argv: Sequence[str]) -> int:
    """Serve fronts until a signal; the process's exit code."""
    try:
        given = parse_command_line(argv, ENGINE)
    except SettingsError as error:
        for line in error.lines:
            print(f"{ENGINE}: {line}", file=sys.stderr)
        return BAD_USAGE
    from quire_server.programs import node_launch  # noqa: PLC0415 - slow, and `--help` does not need it

    return node_launch.run(given)


def build_parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    return parser_of(ENGINE)

"""`quire run-batch`: answers a file of requests without a server, as a server's batch does, with a bar.

Promises: exit code 0 when every line has an answer, 1 when the model or the disk fails or the run was ended, 2 for an
input or flags that cannot work; the heavy half is imported after the flags were read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from quire_server.batches.input import ENDPOINTS
from quire_server.flags import parse_command_line
from quire_server.settings import SettingsError
from quire_server.showing.terminal import BAD_USAGE, Parser, complain

NAME = "run-batch"


def run(argv: Sequence[str]) -> int:
    """Answer all lines; the process's exit code."""
    given, rest = build_parser().parse_known_args(argv)
    if not given.input_file.is_file():
        return complain(NAME, f"--input-file {given.input_file}: there is no such file", BAD_USAGE)
    if not given.output_file.absolute().parent.is_dir():
        return complain(NAME, f"--output-file {given.output_file}: there is no such directory", BAD_USAGE)
    try:
        line = parse_command_line(rest)
    except SettingsError as error:
        return complain(NAME, str(error), BAD_USAGE)
    from quire_server.programs import batch_launch  # noqa: PLC0415 - slow, and a wrong command line ends before

    return batch_launch.run(line, given.input_file, given.output_file)


def build_parser() -> argparse.ArgumentParser:
    """The command\'s own flags."""
    parser = Parser(
        prog=f"quire {NAME}",
        description="Answer a file of requests, one a line, as /v1/batches does, without a server. All further flags"
        " are those of `quire serve`, such as --model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        *("-i", "--input-file"),
        type=Path,
        required=True,
        metavar="FILE",
        help=f'JSONL: {{"custom_id", "method": "POST", "url", "body"}}; the url is one of {", ".join(ENDPOINTS)}',
    )
    parser.add_argument(
        *("-o", "--output-file"),
        type=Path,
        required=True,
        metavar="FILE",
        help="the answers and errors, in the order of the input; FILE.state beside it has a run that has not ended",
    )
    return parser

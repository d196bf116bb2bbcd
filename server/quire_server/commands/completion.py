"""`quire completion bash|zsh|fish`: prints a script with which that shell completes commands, flags and their values.

Promises: the flags are those of the commands' own parsers, and those of `quire serve` the catalogue of settings.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import shtab

from quire_server.commands import COMMANDS
from quire_server.flags import SERVE
from quire_server.flags import build_parser as parser_of
from quire_server.showing.terminal import DONE, Parser

_SHELLS = ("bash", "zsh", "fish")
_TAKES_FLAGS_OF_SERVE = ("run-batch", "config")
_OF_FILES = {"PATH", "FILE", "DIR"}  # names of values that are files or folders


def run(argv: Sequence[str]) -> int:
    """Print the script; the process's exit code."""
    shell = build_parser().parse_args(argv).shell
    print(shtab.complete(whole_parser(), shell))
    return DONE


def build_parser() -> ArgumentParser:
    """The command's own flags."""
    parser = Parser(
        prog="quire completion",
        description="Print a script that completes the commands and flags of quire:"
        ' eval "$(quire completion bash)", eval "$(quire completion zsh)", quire completion fish | source.',
    )
    parser.add_argument("shell", choices=_SHELLS)
    return parser


def whole_parser() -> ArgumentParser:
    """Return a parser of all installed commands with their flags, in the order of `quire --help`."""
    whole = ArgumentParser(prog="quire")
    commands = whole.add_subparsers()
    for name, (module, text) in COMMANDS.items():
        if find_spec(module.partition(".")[0]) is None:
            continue  # its package is not installed
        build = getattr(import_module(module), "build_parser", None)
        parents = [] if build is None else [build()]
        if name in _TAKES_FLAGS_OF_SERVE:
            parents.append(parser_of(SERVE))
        command = commands.add_parser(name, help=text, parents=parents, add_help=False, conflict_handler="resolve")
        for action in command._actions:
            names_a_file = action.type is Path or str(action.metavar) in _OF_FILES
            if names_a_file or not (action.option_strings or action.choices):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return whole

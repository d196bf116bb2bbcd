"""`quire completion bash|zsh|fish`: prints a script with which that shell completes commands, flags and their values.

Promises: the flags are those of the commands' own parsers, and those of `quire serve` the catalogue of settings.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module

from quire_server.cli import COMMANDS
from quire_server.commands.showing.completions import SHELLS, Command, flags_of
from quire_server.commands.showing.terminal import DONE, Parser
from quire_server.flags import SERVE
from quire_server.flags import build_parser as parser_of

# First arguments that are words of the command's own.
_WORDS = {"completion": tuple(SHELLS), "config": ("check", "from")}
_TAKES_FLAGS_OF_SERVE = ("run-batch", "config")


def run(argv: Sequence[str]) -> int:
    """Print the script; the process's exit code."""
    shell = build_parser().parse_args(argv).shell
    print(SHELLS[shell](commands()), end="")
    return DONE


def build_parser() -> ArgumentParser:
    """The command's own flags."""
    parser = Parser(
        prog="quire completion",
        description="Print a script that completes the commands and flags of quire: source <(quire completion bash),"
        " source <(quire completion zsh), quire completion fish | source.",
    )
    parser.add_argument("shell", choices=tuple(SHELLS))
    return parser


def commands() -> list[Command]:
    """All commands with their flags, in the order of `quire --help`."""
    found = []
    for name, (module, text) in COMMANDS.items():
        build = getattr(import_module(module), "build_parser", None)
        flags = () if build is None else flags_of(build())
        if name in _TAKES_FLAGS_OF_SERVE:
            own = {word for flag in flags for word in flag.names}
            flags += tuple(flag for flag in flags_of(parser_of(SERVE)) if not own & {*flag.names})
        found.append(Command(name=name, help=text, flags=flags, words=_WORDS.get(name, ())))
    return found

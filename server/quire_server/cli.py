"""The `quire` command: finds the sub-command's module and runs it.

Promises: imports nothing but the chosen command, and from no folder that every user may write to; problems with
settings are readable lines, never a traceback; a signal ends a process that has nothing to clean up yet in one line.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType

from quire_server.commands import COMMANDS

# All that is loaded before the handlers of signals are there: what follows is imported where it is used.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol
else:
    Protocol = object

FAILED, BAD_USAGE = 1, 2
INTERRUPTED = 130  # as shells report a program that SIGINT has ended


class Command(Protocol):
    """The interface of a command's module."""

    def run(self, argv: Sequence[str]) -> int:
        """Run the command and return the process's exit code."""
        ...


def program() -> int:
    """The entry point of the process: `main` under handlers that end it at once, until a command sets its own.

    An exception, as Python raises one for SIGINT, would be a traceback of whichever import it meets, or be lost there.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as in a background job, which a Ctrl-C is not for
            signal.signal(number, _leave)
    return main()


def _leave(number: int, _frame: FrameType | None) -> None:
    os.write(2, f"quire: ended by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)  # as shells report a program that a signal has ended


def _raise_again() -> None:
    """Give the signals that `_leave` takes back to Python: SIGINT raises, and SIGTERM ends the process."""
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is _leave:
            signal.signal(number, default)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `quire ARGV` and return the process's exit code."""
    from quire_engine.own_modules import (  # noqa: PLC0415
        WritableSearchPath,
        check_search_path,
        leave_out_working_directory,
    )

    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in {"-h", "--help", "help"}:
        print(_usage())
        return 0 if words else BAD_USAGE
    name, *rest = words
    if name in {"--version", "-V"}:
        name = "version"
    if name not in COMMANDS:
        print(f"quire: no command {name!r}; {_hint(name, rest)}", file=sys.stderr)
        return BAD_USAGE
    if leave_out_working_directory(sys.path):
        print("quire: PYTHONPATH has an empty entry, the working directory, which is left out", file=sys.stderr)
    try:
        check_search_path(sys.path)
    except WritableSearchPath as error:
        print(f"quire: {error}", file=sys.stderr)
        return BAD_USAGE
    try:
        return _run(name, rest)
    except KeyboardInterrupt:
        print(f"quire {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of stdout, such as `head`, has closed the pipe
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for the interpreter's flush at its end
        return 0


def _run(name: str, argv: Sequence[str]) -> int:
    try:
        command: Command = import_module(COMMANDS[name][0])
        if name not in {
            "serve",
            "engine",
            "run-batch",
        }:  # whose own handlers come with its event loop, before it starts any process
            _raise_again()
        return command.run(argv)
    except ModuleNotFoundError as error:
        if error.name not in {module.partition(".")[0] for module, _ in COMMANDS.values()}:
            raise
        advice = "install Quire again, in a checkout by `pip install --no-deps -e .`"
        print(f"quire {name}: the package {error.name} is not installed: {advice}", file=sys.stderr)
        return FAILED


_LIST = "models are files and folders that `quire serve` is given; GET /v1/models tells those of a server"
_ELSEWHERE = {  # what other programs' commands are here
    "run": "`quire serve MODEL` serves a model, and then `quire chat` talks to it",
    "pull": "`quire serve MODEL` fetches a model of the Hugging Face Hub at its first start",
    "list": _LIST,
    "ls": _LIST,
    "ps": "GET /api/ps of a server tells its models in memory, and `quire health` whether it takes requests",
    "show": "POST /api/show of a server tells of its model, `quire serve MODEL --dry-run` of any other",
    "stop": "a server ends with Ctrl-C or SIGTERM",
    "rm": "models are files and folders of yours: delete them there",
    "cp": "`quire serve MODEL --served-model-name NAME` gives a model another name",
    "create": "`quire serve MODEL` takes --chat-template and --override-generation-config; there are no Modelfiles",
    "push": "nothing is uploaded",
    "llama-server": "`quire config from llama-server FLAGS` prints the command line that does the same",
    "ollama": "`quire config from ollama NAME=VALUE ...` prints the command line that does the same",
}


def _hint(name: str, rest: Sequence[str]) -> str:
    """Return what to type instead of a word that is no command."""
    from difflib import get_close_matches  # noqa: PLC0415
    from shlex import join  # noqa: PLC0415

    if name.startswith("-") or name.endswith(".gguf"):
        return f"`{join(('quire', 'serve', name, *rest))}` serves a model"
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    close = get_close_matches(name, COMMANDS, n=1)
    return f"did you mean `quire {close[0]}`?" if close else "`quire --help` lists the commands"


def _usage() -> str:
    lines = [f"  {name:<15}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: quire COMMAND [...]", "", *lines, "", "`quire COMMAND --help` says more."])


if __name__ == "__main__":
    sys.exit(program())

"""Runs one of the engine's tools as a child process and reads its JSON replies.

Promises: the server's side never loads torch; a Ctrl-C in the terminal reaches the server only, which then ends the
child.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec

from quire_engine.contract.errors import ConfigError, EngineDead, ModelLoadError
from quire_engine.own_modules import module_command

T = TypeVar("T")
TOOLS = "quire_engine.tools"


class _Refusal(msgspec.Struct):
    """A refusal by the tool; other replies have no field `error`."""

    error: str = ""
    kind: Literal["config", "model"] = "model"


def ask(
    tool: str, question: object, reply_type: type[T], *, timeout: float | None = None, package: str = TOOLS
) -> list[T]:
    """All replies of a tool of the package to one question, after the process has ended. Raises as `ask_each`."""
    return ask_each(tool, [question], reply_type, timeout=timeout, package=package)


def ask_each(
    tool: str, questions: Sequence[object], reply_type: type[T], *, timeout: float | None = None, package: str = TOOLS
) -> list[T]:
    """Return all replies of a tool of the package to several questions, which one process answers.

    Raises ConfigError or ModelLoadError as the tool does, EngineDead if it crashes or takes longer than `timeout`
    seconds.
    """
    try:
        process = subprocess.run(
            module_command(f"{package}.{tool}"),
            input=b"".join(msgspec.json.encode(question) + b"\n" for question in questions),
            stdout=subprocess.PIPE,
            check=False,
            process_group=0,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise EngineDead(f"the {tool} process did not end within {timeout:g} seconds") from None
    lines = process.stdout.splitlines()
    for line in lines:
        _raise_refusal(line)
    if process.returncode:
        raise _ended_early(tool, process.returncode)
    return [msgspec.json.decode(line, type=reply_type) for line in lines]


def replies(tool: str, question: object, reply_type: type[T]) -> Iterator[T]:
    """Yield the replies of one of the engine's tools as they come. A caller that stops early ends the tool."""
    command = module_command(f"{TOOLS}.{tool}")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as process:
        if process.stdin is None or process.stdout is None:
            raise EngineDead(f"the {tool} process has no pipes")
        try:
            with suppress(BrokenPipeError):  # it has ended; its exit code says more
                process.stdin.write(msgspec.json.encode(question) + b"\n")
                process.stdin.close()
            for line in process.stdout:
                _raise_refusal(line)
                yield msgspec.json.decode(line, type=reply_type)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise _ended_early(tool, process.returncode)


def _raise_refusal(line: bytes) -> None:
    refusal = msgspec.json.decode(line, type=_Refusal)
    if refusal.error:
        raise (ConfigError if refusal.kind == "config" else ModelLoadError)(refusal.error)


def _ended_early(tool: str, code: int) -> EngineDead:
    return EngineDead(f"the {tool} process ended early (exit code {code}); was there enough memory?")

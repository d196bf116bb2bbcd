"""Runs a module of ours as a process, and its children likewise, with faults planted in functions:
`python planted_run.py quire_server.cli serve ...`.

The environment's WALK_PLAN is JSON: `folder`, where each process answers SIGUSR2 with the names of its threads and
tasks, and `plants`, each a dictionary with `process` (the module it is for), `target` (module:Class.function), `how`
(raise, panic, full, or slow:SECONDS), and when: `after` so many calls of a process, `times` so often in all of them
(0: for ever).
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [str(ROOT / each) for each in ("server", "engine", "kernels")] + sys.path[1:]

from quire_engine import own_modules  # noqa: E402

PLAN: dict[str, Any] = json.loads(os.environ["WALK_PLAN"])
FOLDER = Path(PLAN["folder"])


class Panic(BaseException):
    """As a library in Rust raises."""


def fault(how: str) -> None:
    if how == "raise":
        raise RuntimeError("planted")
    if how == "panic":
        raise Panic("planted")
    if how == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    time.sleep(float(how.removeprefix("slow:")))


def fired(target: str) -> int:
    """How often it has happened, in all processes: the next one is not to have it again."""
    file = FOLDER / "fired"
    return file.read_text(encoding="utf-8").splitlines().count(target) if file.exists() else 0


def planted(function: Callable[..., Any], plant: dict[str, Any]) -> Callable[..., Any]:
    calls = 0

    def before() -> None:
        nonlocal calls
        calls += 1
        first, times = plant.get("after", 0), plant.get("times", 1)
        if calls > first and (not times or fired(plant["target"]) < times):
            with open(FOLDER / "fired", "a", encoding="utf-8") as file:
                file.write(f"{plant['target']}\n")
            fault(plant["how"])

    if inspect.iscoroutinefunction(function):

        async def run_later(*args: Any, **more: Any) -> Any:
            if plant["how"].startswith("slow:"):
                await asyncio.sleep(0)
            before()
            return await function(*args, **more)

        return functools.wraps(function)(run_later)

    def run(*args: Any, **more: Any) -> Any:
        before()
        return function(*args, **more)

    return functools.wraps(function)(run)


def plant_in(module: str) -> None:
    for each in PLAN["plants"]:
        if each["process"] == module:
            place, _, path = each["target"].partition(":")
            *outer, name = path.split(".")
            owner = functools.reduce(getattr, outer, import_module(place))
            setattr(owner, name, planted(getattr(owner, name), each))


def name_of(task: asyncio.Task[Any]) -> str:
    """Its name, or its function's where nobody has named it."""
    name = task.get_name()
    return str(getattr(task.get_coro(), "__qualname__", name)) if re.fullmatch(r"Task-\d+", name) else name


def tell(*_: object) -> None:
    """Write which threads and tasks there are, under this process's id."""
    try:
        tasks = [name_of(task) for task in asyncio.all_tasks()]
    except RuntimeError:  # there is no event loop
        tasks = []
    told = {"threads": [each.name for each in threading.enumerate()], "tasks": tasks}
    unfinished = FOLDER / f"{os.getpid()}.new"
    unfinished.write_text(json.dumps(told))
    unfinished.replace(FOLDER / f"{os.getpid()}.json")


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), module, *arguments]


if __name__ == "__main__":
    module = sys.argv[1]
    own_modules.module_command = command
    signal.signal(signal.SIGUSR2, tell)
    plant_in(module)
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

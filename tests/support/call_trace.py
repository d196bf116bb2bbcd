"""Which of our functions run, in the order of their first call: what a request's path really is.

`python call_trace.py REPORT FD PARENT_PID` is the engine process, traced; it writes its report when its socket closes.
Promises: comprehensions and lambdas belong to the function around them. Must not know: what is expected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_engine.process.transport import Frame

PACKAGES = ("quire_server", "quire_engine", "quire_kernels")


def dotted(code: CodeType) -> str | None:
    """`quire_engine.engine.Engine.step`; None for what is not a function of ours."""
    parts = Path(code.co_filename).with_suffix("").parts
    package = next((name for name in PACKAGES if name in parts), None)
    if package is None or code.co_qualname == "<module>":
        return None
    module = parts[len(parts) - 1 - parts[::-1].index(package) :]
    function = code.co_qualname.split(".<locals>.<")[0]
    return ".".join([*(part for part in module if part != "__init__"), function])


class Trace:
    """A profile function for `sys.setprofile`, on one thread.

    `calls`: each function's first call, in order. `token`: those that ran, or were waiting for one that ran, between
    the `begin` and `end` of one token, but for functions called from `aside`, which only count things.
    """

    def __init__(self, *, aside: tuple[str, ...] = ()) -> None:
        self.calls: dict[str, None] = {}
        self.token: dict[str, None] = {}
        self.on_return: Callable[[str], None] = lambda name: None
        self._aside = aside
        self._inside_token = False

    def begin(self) -> None:
        self._inside_token = True

    def end(self) -> None:
        self._inside_token = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event not in {"call", "return"}:
            return
        name = dotted(frame.f_code)
        if name is None:
            return
        if event == "return":
            self.on_return(name)
            return
        self.calls.setdefault(name)
        if self._inside_token:
            waiting = list(self._stack(frame))
            if not any(each.startswith(self._aside) for each in waiting):
                self.token.update(dict.fromkeys(waiting))

    def _stack(self, frame: FrameType | None) -> list[str]:
        names = []
        while frame is not None:
            if name := dotted(frame.f_code):
                names.append(name)
            frame = frame.f_back
        return names[::-1]


# What an engine's step counts beside its tokens.
ENGINE_ASIDE = ("quire_engine.scheduling.scheduler.Scheduler.stats", "quire_engine.scheduling.policies.")
WHICH_TOKEN = 5  # the first ones take longer ways


def main(report: Path, fd: int, parent_pid: int) -> None:
    """Be the engine process until the socket closes."""
    from quire_engine.process import __main__ as process
    from quire_engine.process.loop import EngineLoop

    trace = Trace(aside=ENGINE_ASIDE)
    results = 0

    def watch(name: str) -> None:
        nonlocal results
        if name == "quire_engine.execution.executor.Executor.launch":
            results += 1
            if results == WHICH_TOKEN:
                trace.begin()
        elif name == "quire_engine.process.loop.EngineLoop.send":
            trace.end()

    def traced(loop: EngineLoop, early: list[Frame]) -> None:
        sys.setprofile(trace)
        run(loop, early)

    trace.on_return = watch
    run, EngineLoop.run = EngineLoop.run, traced  # loading is not traced: it would take ten times as long
    try:
        process.main(fd, parent_pid)
    finally:
        sys.setprofile(None)
        report.write_text(json.dumps({"calls": list(trace.calls), "token": list(trace.token)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

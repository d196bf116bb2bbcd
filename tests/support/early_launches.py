"""The worst order in which a GPU may run launches that begin before the one before them has ended, in the interpreter.

Promises: the programs of such a launch run up to their wait as soon as it is issued, before anything that was issued
ahead of it has gone on; what they loaded until then they keep, and what they stored they store again before any launch
ahead of them goes on. A launch that has been waited for by nobody ends as soon
as its programs have left, and then the one behind it goes on first. Must not know: any kernel.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import triton.language as tl
from triton.runtime import interpreter

_BUILDER = interpreter.interpreter_builder
_LAUNCH = "AHEAD"  # the argument that says so
assert tl is not None  # the interpreter looks for the language among a kernel's globals


class _Waits(Exception):
    """A program has come to its wait."""


class _Program:
    """One program: what it loaded before its wait, and whether it has ended."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.stores: list[Callable[[], Any]] = []  # before its wait: it may do them at any time until then
        self.done = False


class _Launch:
    def __init__(self, executor: Any, args: Any, kwargs: Any) -> None:
        self.executor, self.args, self.kwargs = executor, args, kwargs
        self.kernel, self.programs = executor.fn, dict[tuple[int, ...], _Program]()

    @property
    def done(self) -> bool:
        return all(program.done for program in self.programs.values())


class EarlyLaunches:
    """Owns the launches that are under way. `overtaken`: launches that went on before one that was issued earlier."""

    def __init__(self, launch: Callable[..., None]) -> None:
        self._launch, self._under_way = launch, list[_Launch]()
        self._program: _Program | None = None
        self._replay: list[Any] | None = None  # loads of a program that goes on, up to its wait
        self.issued = self.overtaken = 0

    def call(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get(_LAUNCH):
            self.finish()
            self._launch(executor, *args, **kwargs)
            return
        launch = _Launch(executor, args, kwargs)
        self.issued += 1

        def begin(**arguments: Any) -> None:
            self._program = launch.programs[_BUILDER.grid_idx] = _Program()
            try:
                launch.kernel(**arguments)
                self._program.done = True
            except _Waits:
                pass
            finally:
                self._program = None

        self._run(launch, begin)
        self._under_way.append(launch)

    def finish(self) -> None:
        """Let all launches go on: of those whose wait has an end the one that was issued last."""
        while any(not launch.done for launch in self._under_way):
            may = [i for i, each in enumerate(self._under_way) if not each.done and self._may_go_on(i)]
            self.overtaken += any(not launch.done for launch in self._under_way[: may[-1]])
            for launch in self._under_way[may[-1] + 1 :]:
                for store in [store for program in launch.programs.values() for store in program.stores]:
                    store()
            self._go_on(self._under_way[may[-1]])
        self._under_way.clear()

    def _may_go_on(self, index: int) -> bool:
        return index == 0 or self._under_way[index - 1].done

    def _go_on(self, launch: _Launch) -> None:
        def resume(**arguments: Any) -> None:
            program = launch.programs[_BUILDER.grid_idx]
            if not program.done:
                self._program, self._replay = program, list(program.loaded)
                launch.kernel(**arguments)
                program.done = True
            self._program = self._replay = None

        self._run(launch, resume)

    def _run(self, launch: _Launch, body: Callable[..., None]) -> None:
        body.__signature__ = inspect.signature(launch.kernel)  # type: ignore[attr-defined]
        launch.executor.fn = body
        self._launch(launch.executor, *launch.args, **launch.kwargs)

    # What a program asks for.

    def wait(self) -> None:
        if self._program is None:
            return
        if self._replay is None:
            raise _Waits
        self._program = self._replay = None  # from here on it does what it does

    def load(self, load: Callable[[], Any]) -> Any:
        if self._replay is not None:
            return self._replay.pop(0)
        found = load()
        if self._program is not None:
            self._program.loaded.append(found)
        return found

    def store(self, store: Callable[[], Any]) -> Any:
        if self._replay is not None:
            return None
        if self._program is not None:
            self._program.stores.append(store)
        return store()


@contextmanager
def early_launches() -> Iterator[EarlyLaunches]:
    """All launches with AHEAD in the worst order; others wait for all before them. At the end all is done."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    order = EarlyLaunches(interpreter.GridExecutor.__call__)
    with ExitStack() as stack:
        stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", _method(order.call)))
        stack.enter_context(patch.object(builder, "create_masked_load", lambda *args: order.load(lambda: load(*args))))
        stack.enter_context(
            patch.object(builder, "create_masked_store", lambda *args: order.store(lambda: store(*args)))
        )
        for module in _of_kernels():
            stack.enter_context(patch.dict(module.__dict__, _hooks(order, module)))
        yield order
        order.finish()


def _method(call: Callable[..., None]) -> Callable[..., None]:
    """A function, which is given its object."""

    def called(self: Any, *args: Any, **kwargs: Any) -> None:
        call(self, *args, **kwargs)

    return called


def _of_kernels() -> list[Any]:
    return [each for each in list(sys.modules.values()) if "gdc_launch_dependents" in getattr(each, "__dict__", {})
            and not each.__name__.startswith("triton")]  # fmt: skip


def _hooks(order: EarlyLaunches, module: Any) -> dict[str, Any]:
    found = {"gdc_wait": order.wait, "gdc_launch_dependents": lambda: None}
    return found | ({"prefetch_rows": lambda *_: None} if hasattr(module, "prefetch_rows") else {})

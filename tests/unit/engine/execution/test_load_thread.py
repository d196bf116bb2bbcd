"""Loads beside the steps: each fails alone, and one that hangs keeps no other from its turn."""

from __future__ import annotations

import threading

import pytest

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.load_thread import LoadThread

_WAIT = 30  # seconds that only a hang reaches


class _Panic(BaseException):
    """What a library in Rust raises."""


@pytest.mark.parametrize("error", [OverflowError("too\nlarge"), MemoryError(), RecursionError("deep"), _Panic("panic")])
def test_whatever_a_load_raises_is_a_refusal_of_one_line_and_the_next_load_runs(error: BaseException) -> None:
    def load(path: str) -> str:
        if path == "bad":
            raise error
        return path

    loads = LoadThread(load, "loads")
    refused, fine = loads.submit("bad"), loads.submit("fine")
    with pytest.raises(ModelLoadError, match=f"bad: cannot be loaded: {type(error).__name__}") as raised:
        refused.result(_WAIT)
    assert "\n" not in str(raised.value)
    assert fine.result(_WAIT) == "fine"


def test_a_load_that_hangs_is_given_up_and_the_others_go_on() -> None:
    hung, go_on = threading.Event(), threading.Event()

    def load(path: str) -> str:
        if path == "hangs":
            hung.set()
            go_on.wait(_WAIT)
        return path

    loads = LoadThread(load, "loads", seconds=0.0)
    hanging, behind = loads.submit("hangs"), loads.submit("behind")
    assert hung.wait(_WAIT)
    loads.give_up_overdue()
    with pytest.raises(ModelLoadError, match="hangs: not read within 0 seconds"):
        hanging.result(_WAIT)
    assert behind.result(_WAIT) == "behind"
    go_on.set()


def test_threads_that_hang_are_bounded() -> None:
    go_on = threading.Event()
    loads = LoadThread(lambda path: go_on.wait(_WAIT), "loads", seconds=0.0)
    futures = []
    while len(futures) < 20 and not (futures and futures[-1].done() and "before it" in str(futures[-1].exception())):
        futures.append(loads.submit("hangs"))
        while not futures[-1].done():
            loads.give_up_overdue()
    assert len(futures) == 9
    go_on.set()

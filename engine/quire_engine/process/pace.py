"""The pace of steps, which an operator may slow or pause to look at a server step by step.

Promises: a pause or a slower pace ends by itself unless its order is repeated, so no request waits for a watcher that
is gone; a step that runs is never interrupted. Must not know: the engine, requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from quire_engine.contract.errors import Unanswerable

Mode = Literal["run", "pause", "slow"]
MODES: tuple[Mode, ...] = ("run", "pause", "slow")
LEASE_SECONDS = 5.0  # after an order; the watcher repeats it in time
LEAST_SECONDS, MOST_SECONDS = 0.02, 5.0  # between the begins of two slow steps
MOST_STEPS = 64  # of one order


class Pace:
    """The pace that the last order asked for. Times are seconds of one clock."""

    def __init__(self) -> None:
        self.mode: Mode = "run"
        self.seconds = 0.0  # between two steps, when slow
        self.steps_left = 0  # that a pause lets through
        self._until = 0.0
        self._began = -math.inf  # the last step

    def order(self, arguments: Mapping[str, Any], now: float) -> dict[str, object]:
        """Take over an order and return what holds now. Raises Unanswerable.

        `mode`: run, pause or slow; `seconds`: between two steps, when slow; `steps`: to let through in a pause. An
        order without a mode repeats the last one, so that it goes on to hold.
        """
        mode = arguments.get("mode", self.mode)
        steps, seconds = int(arguments.get("steps", 0)), float(arguments.get("seconds", self.seconds))
        if mode not in MODES:
            raise Unanswerable(f"there is no pace {mode!r}; there are {', '.join(MODES)}")
        if mode == "slow" and not LEAST_SECONDS <= seconds <= MOST_SECONDS:
            raise Unanswerable(f"seconds is {seconds:g}, must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}")
        if not 0 <= steps <= MOST_STEPS or (steps and mode != "pause"):
            raise Unanswerable(f"steps is {steps}, must be from 0 to {MOST_STEPS}, and is for a pause")
        self._end_lease(now)
        if "mode" in arguments:
            self.steps_left = 0 if mode != self.mode else self.steps_left
            self.mode, self.seconds = mode, seconds if mode == "slow" else 0.0
            self.steps_left = min(self.steps_left + steps, MOST_STEPS)
        self._until = now + LEASE_SECONDS
        return {"mode": self.mode, "seconds": self.seconds, "steps_left": self.steps_left}

    def delay(self, now: float) -> float:
        """Seconds until the next step may begin, unless an order changes that; 0: it may."""
        if self.mode != "run":
            self._end_lease(now)
        if self.mode == "slow":
            return max(0.0, min(self._began + self.seconds, self._until) - now)
        return self._until - now if self.mode == "pause" and not self.steps_left else 0.0

    def begins(self, now: float) -> None:
        """A step begins."""
        self._began = now
        self.steps_left = max(0, self.steps_left - 1)

    def _end_lease(self, now: float) -> None:
        """Let everything run again once the last order's time is over."""
        if now >= self._until:
            self.mode, self.seconds, self.steps_left = "run", 0.0, 0

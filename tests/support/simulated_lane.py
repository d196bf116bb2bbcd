"""What a simulated device hands out: events, lanes of copies beside its work, graphs.

Promises: a lane keeps its own order, and waits for the work where it follows an event of it, and nowhere else; what
nobody follows is done last, or first where lanes are eager. Must not know: the runner, torch's operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

Device = Any  # simulated_device.SimulatedDevice
Work = Callable[[], None]


class SimulatedEvent:
    def __init__(self, device: Device, position: int) -> None:
        self._device, self._position = device, position

    def wait(self) -> None:
        self._device.run_until(self._position, "event")

    def pass_by(self) -> None:
        self._device.do_until(self._position)


class SimulatedLane:
    """See `Lane`: a queue of its own, done when something that follows it is, or at once."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._queue: deque[Work] = deque()
        self.issued = self._done = 0

    def send(self, source: Tensor, target: Tensor) -> None:
        self.device.check_host(source)
        self._issue(lambda: self.device.execute(lambda: target.copy_(source)))

    def fetch(self, source: Tensor, target: Tensor) -> None:
        self.device.check_host(target)
        self._issue(lambda: self.device.execute(lambda: target.copy_(source)))

    def follow(self, event: SimulatedEvent) -> None:
        self._issue(event.pass_by)

    def record(self) -> LaneEvent:
        return LaneEvent(self, self.issued)

    def run_until(self, end: int) -> None:
        while self._done < end:
            self._done += 1
            self._queue.popleft()()

    def _issue(self, work: Work) -> None:
        self._queue.append(work)
        self.issued += 1
        if self.device.eager_lanes:
            self.run_until(self.issued)


class LaneEvent:
    def __init__(self, lane: SimulatedLane, position: int) -> None:
        self._lane, self._position = lane, position

    def wait(self) -> None:
        self._lane.device.waits.append("lane")
        self.pass_by()

    def pass_by(self) -> None:
        self._lane.run_until(self._position)


class SimulatedGraph:
    def __init__(self, device: Device, capture: Any) -> None:
        self._device, self._capture = device, capture

    def replay(self) -> None:
        for storage in self._capture.storages.values():
            if storage.expired():
                raise RuntimeError("a graph was replayed that reads or writes memory which is not there any more")
        self._device.replays += 1
        self._device.poison_graph_memory()
        for operation in self._capture.operations:
            self._device.issue(operation)

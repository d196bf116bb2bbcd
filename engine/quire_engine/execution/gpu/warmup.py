"""Warm-up of a GPU's runner: graphs captured before they are needed, and the faster launches of decodes measured.

Promises: computes padding alone, and only while no step is in flight. Must not know: requests, sampling.
"""

from __future__ import annotations

import logging
import time

import torch

from quire_engine.execution.gpu.device import Device, Packed
from quire_engine.execution.gpu.graphs import Bucket, MixedBucket
from quire_engine.execution.gpu.launches import Launches
from quire_engine.execution.gpu.resident import GRAPHS, Resident
from quire_engine.execution.gpu.step_arrays import StepArrays

_log = logging.getLogger(__name__)
_MEASURED_ROWS, _MEASURED_REPLAYS = (1, 8, 16, 32, 64), 5


class WarmUp:
    """Captures graphs and measures launches of one runner. Call within its `work`."""

    def __init__(self, launches: Launches, resident: Resident, device: Device) -> None:
        self._launches, self._resident, self._device = launches, resident, device

    def capture_largest(self) -> None:
        """Capture the graphs that take the most memory: in what they allocate all others find room."""
        graphs = self._resident.graphs
        bucket, mixed = graphs.largest, graphs.largest_mixed
        self._run_empty(bucket)
        if mixed is not None:
            self._run_empty(mixed)

    def choose_launches(self) -> None:
        """Measure decodes in fewer launches and by single ops, as graphs of padding, and take the faster ones.

        Where that fails, single ops are used.
        """
        graphs = self._resident.graphs
        for num_rows in [size for size in graphs.sizes if size in _MEASURED_ROWS]:
            bucket = Bucket(num_rows, graphs.shortest, 0)
            try:
                packed = self._launches.send_decodes(StepArrays(), bucket)
                single, chained = (self._seconds(bucket, packed, chained=way) for way in (False, True))
            except Exception as error:  # of the device's memory, of a capture, of a kernel's compiler
                self._device.release()
                _log.warning("steps of %d decodes are computed by single ops: %s", num_rows, error)
                return
            self._launches.chained[num_rows] = chained < single
            _log.info(
                "%d decodes: %.3f ms in fewer launches, %.3f ms by single ops", num_rows, chained * 1e3, single * 1e3
            )

    def capture_next(self) -> int:
        """Capture one graph that steps will likely need; return how many are left."""
        graphs = self._resident.graphs
        missing = graphs.missing()
        if not missing:
            return 0
        try:
            self._run_empty(missing[0])
        except torch.OutOfMemoryError:  # of its eager step, before the capture
            graphs.leave(missing[0])
            self._device.release()
        return len(graphs.missing())

    def _seconds(self, bucket: Bucket, packed: Packed, *, chained: bool) -> float:
        """The shortest of a few replays of a bucket's step."""
        forward, into = self._resident.forward, self._resident.regions[GRAPHS]

        def compute() -> None:
            forward.decode(packed, *bucket, into, chained=chained)

        compute()  # kernels are compiled
        graph, found = self._device.capture(compute), list[float]()
        for _ in range(_MEASURED_REPLAYS):
            self._device.record().wait()
            started = time.perf_counter()
            graph.replay()
            self._device.record().wait()
            found.append(time.perf_counter() - started)
        return min(found)

    def _run_empty(self, bucket: Bucket | MixedBucket) -> None:
        """A step of padding alone."""
        if isinstance(bucket, MixedBucket):
            self._launches.mixed(StepArrays(), bucket)
        else:
            self._launches.decodes(bucket, self._launches.send_decodes(StepArrays(), bucket))

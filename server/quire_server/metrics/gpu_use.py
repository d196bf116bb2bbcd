"""The use of the GPU that the engine computes on, as the driver tells it by NVML, with the package `nvidia-ml-py`.

Promises: a look takes microseconds and never raises; where the package, the driver or the GPU is not this machine's,
there is no answer, and none is asked for again. Must not know: the event loop, HTTP.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from quire_server.metrics.metric_values import Values


class GpuUse(NamedTuple):
    """One look at a GPU, with all that is computed there."""

    busy: float  # 0 to 1: of the driver's last sample period, up to a second, the share in which a kernel ran
    memory: int  # bytes in use


class GpuReader:
    """Looks at one GPU, given by its UUID."""

    def __init__(self, nvml: Any = None) -> None:
        """`nvml`: the module; None: imported when it is needed, if it is installed."""
        self._nvml, self._uuid, self._handle = nvml, "", None

    def follow(self, uuid: str) -> None:
        """Read this GPU from now on; none if the id is empty."""
        if uuid == self._uuid:
            return
        self._uuid, self._handle = uuid, None
        if not uuid:
            return
        try:
            self._nvml = import_module("pynvml") if self._nvml is None else self._nvml
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception:  # not installed, no driver, another machine's: NVML has an error class for each reason
            self._handle = None

    def read(self) -> GpuUse | None:
        """None: it cannot be seen from here."""
        if self._handle is None:
            return None
        try:
            busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            return GpuUse(busy=busy / 100, memory=int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used))
        except self._nvml.NVMLError:
            return None


class GpuMetrics:
    """The gauges of the engine's GPU; absent where it cannot be seen."""

    def __init__(self, values: Values, reader: GpuReader | None = None) -> None:
        self.reader = reader or GpuReader()
        self._busy = values.gauge(
            "quire_gpu_utilization_ratio",
            "Of the driver's last sample period, up to a second, the share in which the engine's GPU computed; absent"
            " where it cannot be read.",
            children=(),
        )
        self._memory = values.gauge(
            "quire_gpu_memory_used_bytes",
            "Memory of that GPU in use, by whatever process, bytes; absent where it cannot be read.",
            children=(),
        )

    def follow(self, uuid: str) -> None:
        """The engine computes on this GPU; empty: on none."""
        self.reader.follow(uuid)

    def read(self) -> GpuUse | None:
        """None: it cannot be seen from here."""
        return self.reader.read()

    def show(self) -> None:
        """Set the gauges; called at each scrape."""
        use = self.read()
        self._busy.values.clear()
        self._memory.values.clear()
        if use is not None:
            self._busy.set(use.busy)
            self._memory.set(use.memory)

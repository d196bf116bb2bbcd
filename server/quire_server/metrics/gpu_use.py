"""The use of the GPU that the engine computes on, as the driver tells it by its library, NVML.

Promises: a look takes microseconds and never raises; where the library or the GPU is not this machine's, there is no
answer, and the library is not asked for again. Must not know: the event loop, HTTP.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

from quire_server.metrics.metric_values import Values

_LIBRARY = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the last sample period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`: bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuUse(NamedTuple):
    """One look at a GPU, with all that is computed there."""

    busy: float  # 0 to 1: of the driver's last sample period, up to a second, the share in which a kernel ran
    memory: int  # bytes in use


class GpuReader:
    """Looks at one GPU, given by its UUID."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """`load`: gives the library; raises OSError where there is none."""
        self._load = load
        self._uuid = ""
        self._library: Any = None
        self._device = ctypes.c_void_p()

    def follow(self, uuid: str) -> None:
        """From now on look at this GPU; empty: at none."""
        if uuid == self._uuid:
            return
        self._uuid, self._library = uuid, None
        if not uuid:
            return
        try:
            library = self._load(_LIBRARY)
            found = library.nvmlInit_v2() == 0 and self._find(library, uuid)
        except (OSError, AttributeError):  # no driver; one that is too old
            return
        self._library = library if found else None

    def _find(self, library: Any, uuid: str) -> bool:
        return bool(library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._device)) == 0)

    def read(self) -> GpuUse | None:
        """None: it cannot be seen from here."""
        if self._library is None:
            return None
        rates, memory = _Utilization(), _Memory()
        failed = self._library.nvmlDeviceGetUtilizationRates(self._device, ctypes.byref(rates))
        failed |= self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory))
        return None if failed else GpuUse(busy=rates.gpu / 100, memory=memory.used)


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

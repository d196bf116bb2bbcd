"""The energy that this machine's processors and GPUs have used while the server ran, where their counters are readable.

Linux's powercap tree has the counters of CPU packages and their memory (RAPL); NVML those of GPUs, with the package
`nvidia-ml-py`. A counter is the machine's, not one process's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from quire_server.metrics.metric_values import Values

POWERCAP = Path("/sys/class/powercap")
_LEAVES = ("core", "uncore")  # parts of a package, which counts them too
Read = Callable[[], float]  # joules since some time; raises OSError where the counter is gone


class EnergyMetrics:
    """One counter for each domain. Without a readable counter, and before `begin`, nothing is exported."""

    def __init__(self, values: Values) -> None:
        self._joules = values.counter(
            "quire_energy_joules",
            "Energy that the machine's CPU packages, their memory and its GPUs used while the server ran, joules.",
            ("domain",),
            children=(),
        )
        self._meters: dict[str, tuple[Read, float]] = {}  # with the reach of a counter, behind which it begins anew
        self._last: dict[str, float] = {}

    def begin(self, *, powercap: Path = POWERCAP, nvml: Any = None) -> None:
        """Count from now on, in one place of a server. `nvml`: the module; None: imported, if it is installed."""
        for name, read, reach in (*_packages(powercap), *_gpus(nvml)):
            try:
                self._last[name] = read()
            except OSError:
                continue
            self._meters[name] = read, reach
            self._joules.inc(0, name)

    def tick(self) -> None:
        """Add what was used since the last call, which was less than one reach ago: a minute at thousands of watts."""
        for name, (read, reach) in tuple(self._meters.items()):
            try:
                now = read()
            except OSError:
                del self._meters[name]
                continue
            used = now - self._last[name]
            self._joules.inc(used if used >= 0 else used + reach, name)
            self._last[name] = now


def _packages(powercap: Path) -> Iterator[tuple[str, Read, float]]:
    """The RAPL domains: package-0, dram-0 for the memory of that package, psys for the whole board."""
    for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's too
        try:
            name = (zone / "name").read_text().strip()
            reach = int((zone / "max_energy_range_uj").read_text()) / 1e6
        except (OSError, ValueError):
            continue
        if name in _LEAVES:
            continue
        parent = zone.name.removeprefix("intel-rapl:").partition(":")[0]
        yield (f"{name}-{parent}" if ":" in zone.name.removeprefix("intel-rapl:") else name), _file(zone), reach


def _file(zone: Path) -> Read:
    path = zone / "energy_uj"
    return lambda: int(path.read_text()) / 1e6


def _gpus(nvml: Any) -> Iterator[tuple[str, Read, float]]:
    """One domain for each GPU that counts its energy: gpu-0."""
    try:
        nvml = import_module("pynvml") if nvml is None else nvml
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # not installed, or no driver: NVML has an error class for each reason
        return
    for number, handle in enumerate(handles):
        yield f"gpu-{number}", _device(nvml, handle), 0.0


def _device(nvml: Any, handle: object) -> Read:
    def read() -> float:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except nvml.NVMLError as error:
            raise OSError(str(error)) from None

    return read

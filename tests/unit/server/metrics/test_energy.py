"""Energy counters: which domains are counted, over the end of a counter's range, and where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quire_server.metrics.energy import EnergyMetrics
from quire_server.metrics.metric_values import Values


class Nvml:
    """Two GPUs, of which one does not count its energy."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.millijoules = 5_000

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return self.millijoules


def zone(powercap: Path, name: str, told: str, microjoules: int) -> Path:
    folder = powercap / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{told}\n")
    (folder / "max_energy_range_uj").write_text("10000000\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def samples(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("quire_energy")]
    return {line.partition('domain="')[2].partition('"')[0]: float(line.split()[-1]) for line in lines}


def test_what_is_used_while_it_runs_is_counted(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 9_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 1)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 0)
    unreadable = zone(tmp_path, "intel-rapl:1", "package-1", 0)
    unreadable.unlink()
    registry, nvml = CollectorRegistry(), Nvml()
    energy = EnergyMetrics(Values(registry, {"model_name": "fake"}))
    assert samples(registry) == {}
    energy.begin(powercap=tmp_path, nvml=nvml)
    assert samples(registry) == {"package-0": 0.0, "dram-0": 0.0, "gpu-0": 0.0}
    for reading, used in ((9_500_000, 0.5), (500_000, 1.5), (600_000, 1.6)):  # once over the end of its range
        package.write_text(f"{reading}\n")
        energy.tick()
        assert samples(registry)["package-0"] == pytest.approx(used)
    memory.unlink()
    nvml.millijoules += 2_500
    energy.tick()
    assert samples(registry) == {"package-0": pytest.approx(1.6), "dram-0": 0.0, "gpu-0": 2.5}


def test_without_a_counter_nothing_is_told(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    energy = EnergyMetrics(Values(registry, {}))
    energy.begin(powercap=tmp_path / "none")
    energy.tick()
    assert [name for name in samples(registry) if not name.startswith("gpu-")] == []

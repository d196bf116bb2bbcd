"""The GPU's utilisation as the driver tells it: read by a package and a driver that are not there on this machine."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import msgspec
import pytest

from quire_server.metrics.gpu_use import GpuReader, GpuUse
from quire_server.metrics.metrics import Metrics

UUID = "GPU-1234"


class Nvml:
    """The functions of `pynvml`, for one GPU."""

    class NVMLError(Exception):
        pass

    def __init__(self, failing: str = "") -> None:
        self.busy, self.used, self.failing, self.starts = 37, 5 << 30, failing, 0

    def _may_fail(self, name: str) -> None:
        if self.failing == name:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        self.starts += 1
        self._may_fail("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise self.NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        assert handle == "handle"
        self._may_fail("rates")
        return SimpleNamespace(gpu=self.busy, memory=3)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._may_fail("memory")
        return SimpleNamespace(total=80 << 30, free=75 << 30, used=self.used)


def test_it_reads_the_gpu_of_the_engine():
    driver = Nvml()
    reader = GpuReader(driver)
    assert reader.read() is None, "no engine has started"
    reader.follow(UUID)
    assert reader.read() == GpuUse(busy=0.37, memory=5 << 30)
    driver.busy = 100
    assert reader.read() == GpuUse(busy=1.0, memory=5 << 30)
    reader.follow(UUID)
    assert driver.starts == 1
    reader.follow("")
    assert reader.read() is None


@pytest.mark.parametrize("failing", ["init", "rates", "memory"])
def test_what_the_driver_refuses_is_no_answer(failing):
    reader = GpuReader(Nvml(failing))
    reader.follow(UUID)
    assert reader.read() is None


def test_a_gpu_of_another_machine_and_a_machine_without_the_package_give_none(monkeypatch):
    reader = GpuReader(Nvml())
    reader.follow("GPU-of-a-node")
    assert reader.read() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader = GpuReader()
    reader.follow(UUID)
    assert reader.read() is None
    driver = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    reader = GpuReader()
    reader.follow(UUID)
    assert reader.read() == GpuUse(busy=0.37, memory=5 << 30)


def test_the_gauges_and_the_dashboard_have_it_where_it_can_be_read():
    metrics, driver = Metrics("m"), Nvml()
    assert b"quire_gpu_utilization_ratio{" not in metrics.render()
    assert msgspec.json.decode(metrics.tick())["frame"]["gpu"] is None
    reader = metrics.gpu.reader = GpuReader(driver)
    reader.follow(UUID)
    shown = metrics.render()
    assert b'quire_gpu_utilization_ratio{model_name="m"} 0.37' in shown
    assert b'quire_gpu_memory_used_bytes{model_name="m"} 5.36870912e+09' in shown
    assert msgspec.json.decode(metrics.tick())["frame"]["gpu"] == 0.37
    reader.follow("")
    assert b"quire_gpu_utilization_ratio{" not in metrics.render()

"""The GPU's utilisation as the driver tells it: read by a library that is not there on this machine."""

from __future__ import annotations

import ctypes

import msgspec
import pytest

from quire_server.metrics.gpu_use import GpuReader, GpuUse
from quire_server.metrics.metrics import Metrics

UUID = "GPU-1234"


class Driver:
    """NVML's functions, for one GPU."""

    def __init__(self, **failing: int) -> None:
        self.busy, self.used, self.failing = 37, 5 << 30, failing
        self.loads = 0

    def load(self, name: str) -> Driver:
        assert name == "libnvidia-ml.so.1"
        self.loads += 1
        return self

    def nvmlInit_v2(self) -> int:
        return self.failing.get("init", 0)

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: object) -> int:
        if uuid != UUID.encode():
            return 6
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = 99
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, rates: object) -> int:
        assert device.value == 99
        ctypes.cast(rates, ctypes.POINTER(ctypes.c_uint))[0] = self.busy
        return self.failing.get("rates", 0)

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, memory: object) -> int:
        ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))[2] = self.used
        return self.failing.get("memory", 0)


def test_it_reads_the_gpu_of_the_engine():
    driver = Driver()
    reader = GpuReader(driver.load)
    assert reader.read() is None, "no engine has started"
    reader.follow(UUID)
    assert reader.read() == GpuUse(busy=0.37, memory=5 << 30)
    driver.busy = 100
    assert reader.read() == GpuUse(busy=1.0, memory=5 << 30)
    reader.follow(UUID)
    assert driver.loads == 1
    reader.follow("")
    assert reader.read() is None


@pytest.mark.parametrize("failing", [{"init": 1}, {"rates": 3}, {"memory": 15}])
def test_what_the_driver_refuses_is_no_answer(failing):
    reader = GpuReader(Driver(**failing).load)
    reader.follow(UUID)
    assert reader.read() is None


def test_a_gpu_of_another_machine_and_a_machine_without_a_driver_give_none():
    reader = GpuReader(Driver().load)
    reader.follow("GPU-of-a-node")
    assert reader.read() is None

    def missing(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    reader = GpuReader(missing)
    reader.follow(UUID)
    assert reader.read() is None


def test_the_gauges_and_the_dashboard_have_it_where_it_can_be_read():
    metrics, driver = Metrics("m"), Driver()
    assert b"quire_gpu_utilization_ratio{" not in metrics.render()
    assert msgspec.json.decode(metrics.tick())["frame"]["gpu"] is None
    reader = metrics.gpu.reader = GpuReader(driver.load)
    reader.follow(UUID)
    shown = metrics.render()
    assert b'quire_gpu_utilization_ratio{model_name="m"} 0.37' in shown
    assert b'quire_gpu_memory_used_bytes{model_name="m"} 5.36870912e+09' in shown
    assert msgspec.json.decode(metrics.tick())["frame"]["gpu"] == 0.37
    reader.follow("")
    assert b"quire_gpu_utilization_ratio{" not in metrics.render()

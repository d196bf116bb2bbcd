"""The device by torch.cuda keeps what `Device` promises; the simulated one is held to the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire_engine.execution.gpu.device import CudaDevice
from support.simulated_device import SimulatedDevice

pytestmark = pytest.mark.parametrize("kind", ["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])


def device_of(kind: str) -> Any:
    return SimulatedDevice() if kind == "simulated" else CudaDevice(torch.device("cuda"))


def test_copies_are_done_when_an_event_behind_them_is(kind):
    device = device_of(kind)
    there, back = device.host_buffer(8), device.host_buffer(8)
    there.bytes.cast("q")[0] = 41
    with device.work(), torch.inference_mode():
        value = torch.zeros(8, dtype=torch.uint8, device=device.torch_device)
        device.send(there.tensor, value)
        value.view(torch.int64).add_(1)
        device.fetch(value, back.tensor)
        device.record().wait()
    assert back.bytes.cast("q")[0] == 42


def test_a_graph_reads_what_lies_at_its_addresses_at_the_replay(kind):
    device = device_of(kind)
    back = device.host_buffer(16)
    kept: list[torch.Tensor] = []
    with device.work(), torch.inference_mode():
        x = torch.ones(4, device=device.torch_device)
        y = torch.zeros(4, device=device.torch_device)

        def body() -> None:
            kept.append(x * 3.0)
            y.copy_(kept[-1] + 1.0)

        body()  # the warm-up
        kept.clear()
        graph = device.capture(body)
        borrowed = device.borrow(kept.pop())
        x.fill_(5.0)
        graph.replay()
        device.fetch((y + borrowed).view(torch.uint8), back.tensor)
        device.record().wait()
    assert list(back.bytes.cast("f")) == [31.0] * 4


def test_a_capture_without_memory_is_told_apart_and_survived(kind):
    device = device_of(kind)

    def body() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    back = device.host_buffer(4)
    with device.work(), torch.inference_mode():
        with pytest.raises(torch.OutOfMemoryError):
            device.capture(body)
        device.fetch(torch.full((1,), 2.0, device=device.torch_device).view(torch.uint8), back.tensor)
        device.record().wait()
    assert back.bytes.cast("f")[0] == 2.0


@pytest.mark.parametrize("eager", [True, False])
def test_a_lane_and_the_work_wait_for_each_other_where_they_follow_events(kind, eager):
    """A value is changed, taken out by the lane, changed on the way, brought back by it and changed again."""
    device = device_of(kind)
    if kind == "simulated":
        device.eager_lanes = eager
    size = 64 << 20 if kind == "cuda" else 64
    there, back, lane = device.host_buffer(size), device.host_buffer(8), device.lane()
    with device.work(), torch.inference_mode():
        value = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        for _ in range(5):
            value.add_(1)
            lane.follow(device.record())
            lane.fetch(value, there.tensor)
            device.follow(lane.record())
            value.fill_(100)
            lane.follow(device.record())
            lane.send(there.tensor, value)
            device.follow(lane.record())
        device.fetch(value[-8:], back.tensor)
        device.record().wait()
    assert bytes(back.bytes) == b"\5" * 8
    lane.record().wait()
    assert bytes(there.bytes[:8]) == b"\5" * 8

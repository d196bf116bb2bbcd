"""One buffer for a step's input: where sections lie, when a host buffer is written again."""

from __future__ import annotations

from array import array

import pytest
import torch

from quire_engine.execution.gpu.device import PackedInput
from support.simulated_device import SimulatedDevice


def packed(num_bytes: int = 256, **options) -> tuple[SimulatedDevice, PackedInput]:
    device = SimulatedDevice()
    return device, PackedInput(device, torch.zeros(num_bytes, dtype=torch.uint8), **options)


def test_sections_are_typed_and_begin_at_whole_16_bytes():
    device, step = packed()
    sent = step.send(
        {"ids": array("q", [1, -2, 2**62]), "none": array("q"), "lens": array("i", [7]), "x": array("q", [5])}
    )
    device.finish()
    assert sent["ids"].tolist() == [1, -2, 2**62]
    assert (sent["ids"].dtype, sent["lens"].dtype) == (torch.int64, torch.int32)
    assert (sent["none"].tolist(), sent["lens"].tolist(), sent["x"].tolist()) == ([], [7], [5])
    assert [offset for offset, _, _ in sent.sections.values()] == [0, 32, 32, 48]
    assert device.sent == 1


def test_a_step_without_input_is_no_copy():
    device, step = packed()
    step.send({"none": array("q")})
    assert device.sent == 0


def test_what_does_not_fit_is_refused():
    _, step = packed(32)
    step.send({"a": array("q", [1, 2]), "b": array("i", [1])})
    with pytest.raises(ValueError, match="48 bytes is more than the 32"):
        step.send({"a": array("q", [1, 2]), "b": array("i", [1, 2, 3, 4, 5])})


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_a_buffer_is_written_when_the_device_has_read_it(num_buffers):
    """And not earlier: the copies run as late as a wait allows."""
    device, step = packed(num_buffers=num_buffers)
    seen = []
    for number in range(6):
        sent = step.send({"a": array("q", [number])})["a"]
        device.issue(lambda sent=sent: seen.append(int(sent)))
        assert len(device.waits) == max(0, number + 1 - num_buffers)
    device.finish()
    assert seen == list(range(6))

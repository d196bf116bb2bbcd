"""Why a GPU that is there is not used, told from the files of a machine and from what torch says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from quire_engine.contract.errors import ConfigError
from quire_engine.execution import device
from quire_engine.machine import gpu_driver, why_no_gpu

DRIVER = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024
GCC version:  gcc version 12.3.0
"""
OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update\nyour GPU driver"


def machine(root: Path, *, driver: str = "", nodes: tuple[str, ...] = (), environment: str = "", pci: str = "") -> Path:
    def write(name: str, text: str) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/self/environ", environment)
    if driver:
        write("proc/driver/nvidia/version", driver)
    for node in nodes:
        write(f"dev/{node}", "")
    if pci:
        write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
        write("sys/bus/pci/devices/0000:01:00.0/class", f"{pci}\n")
    return root


NODES = ("nvidia0", "nvidiactl")


@pytest.mark.parametrize(
    ("files", "cuda", "error", "said"),
    [
        ({}, "13.0", "No CUDA GPUs are available", None),
        ({"pci": "0x0c0330"}, "13.0", "", None),  # a USB controller of the same maker
        ({"pci": "0x030200"}, "13.0", "", "no driver for it is loaded"),
        ({"driver": DRIVER, "nodes": NODES}, None, "not compiled", "torch is built for CPUs only"),
        (
            {"driver": DRIVER, "nodes": NODES, "environment": "A=1\0CUDA_VISIBLE_DEVICES=\0B=2\0"},
            "13.0",
            "No CUDA GPUs are available",
            "CUDA_VISIBLE_DEVICES= hides it; unset it",
        ),
        ({"driver": DRIVER, "nodes": NODES, "environment": "CUDA_VISIBLE_DEVICES=-1\0"}, "13.0", "", "=-1 hides it"),
        ({"driver": DRIVER}, "13.0", "", "it is not in /dev; start the container with its GPUs"),
        ({"driver": DRIVER, "nodes": ("nvidiactl",)}, "13.0", "", "it is not in /dev"),
        (
            {"driver": DRIVER, "nodes": NODES, "environment": "CUDA_VISIBLE_DEVICES=0\0"},
            "13.0",
            TOO_OLD,
            "its driver 470.256.02 is too old for torch's CUDA 13.0; update the driver",
        ),
        (
            {"driver": OPEN_DRIVER, "nodes": NODES},
            "12.8",
            "system not yet initialized",
            "CUDA 12.8 cannot use it with driver 580.95.05: system not yet initialized",
        ),
    ],
)
def test_the_reason_and_what_would_help(files, cuda, error, said, tmp_path):
    reason = why_no_gpu(cuda, error, machine(tmp_path, **files), may_open=lambda _: True)
    if said is None:
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith("there is an NVIDIA GPU, but ")
        assert said in reason
        assert "\n" not in reason


def test_devices_that_may_not_be_opened_are_named(tmp_path):
    root = machine(tmp_path, driver=DRIVER, nodes=NODES)
    reason = why_no_gpu("13.0", "", root, may_open=lambda path: path.name == "nvidiactl")
    assert reason == (
        "there is an NVIDIA GPU, but this user may not open /dev/nvidia0; give it the rights to read and write"
    )


def test_the_version_of_either_driver(tmp_path):
    assert gpu_driver(machine(tmp_path / "closed", driver=DRIVER)) == "470.256.02"
    assert gpu_driver(machine(tmp_path / "open", driver=OPEN_DRIVER)) == "580.95.05"
    assert gpu_driver(machine(tmp_path / "none")) == ""


@pytest.fixture
def no_gpu(monkeypatch):
    """torch finds none, and says why."""

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def on(root: Path) -> None:
        monkeypatch.setattr(device, "why_no_gpu", lambda *told: why_no_gpu(*told, root, may_open=lambda _: True))

    return on


def test_auto_that_lands_on_the_cpu_beside_a_gpu_warns_and_cuda_says_why(no_gpu, tmp_path, caplog):
    no_gpu(machine(tmp_path, driver=DRIVER, nodes=NODES))
    with caplog.at_level(logging.WARNING):
        assert device.resolve_device("cpu").type == "cpu"
        assert not caplog.records
        assert device.resolve_device("auto").type == "cpu"
    (record,) = caplog.records
    assert record.getMessage().startswith("computing on the CPU: there is an NVIDIA GPU, but its driver 470.256.02 is")
    with pytest.raises(ConfigError, match=r"no usable GPU: there is .* too old .*; set device to cpu or auto"):
        device.resolve_device("cuda")


def test_a_machine_without_a_gpu_is_no_reason_to_warn(no_gpu, tmp_path, caplog):
    no_gpu(machine(tmp_path))
    assert device.resolve_device("auto").type == "cpu"
    assert not caplog.records
    with pytest.raises(ConfigError, match="no usable GPU; set device to cpu or auto"):
        device.resolve_device("cuda")
    with pytest.raises(ConfigError, match="device=tpu is unknown"):
        device.resolve_device("tpu")


def test_a_gpu_that_can_be_used_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.resolve_device("auto").type == device.resolve_device("cuda").type == "cuda"
    assert device.unused_gpu() is None

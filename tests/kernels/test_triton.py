"""The Triton kernels' tests, run as they need to be: Triton decides when it is imported whether it interprets."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"
ROOT = Path(__file__).parents[2]
BY_TWO = ("-n", "2", "--dist", "worksteal")  # this is the longest of all tests: one process would hold the others up

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton for this system"),
    pytest.mark.timeout(3600),
]


def _run(selection: str, *options: str, **environment: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "pytest", FOLDER, "-m", selection, "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_interpreted():
    _run("not sim and not matrix", *BY_TWO, TRITON_INTERPRET="1")


@pytest.mark.matrix
def test_interpreted_rows():
    _run("not sim and matrix", *BY_TWO, TRITON_INTERPRET="1")


@pytest.mark.sim
def test_interpreted_at_length():
    _run("sim", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_on_a_gpu():
    _run("not sim or sim", QUIRE_TRITON_DEVICE="cuda")

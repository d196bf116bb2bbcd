"""Engines on simulated GPUs: ranks as processes, their start, bits and ends; the quality that an fp8 KV cache costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def engine(what: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "support.simulated_gpus", what]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_an_engine_of_two_processes_has_the_bits_of_one_and_leaves_nobody_behind():
    done = engine("same")
    assert done.returncode == 0, done.stderr


def test_the_cost_of_an_fp8_kv_cache_is_measured_there():
    done = engine("quality")
    assert done.returncode == 0, done.stderr
    assert "greedy agreement" in done.stdout


# `make rank-test` takes both.
@pytest.mark.parametrize(
    ("what", "code"), [("killed", -signal.SIGKILL), pytest.param("crashed", 1, marks=pytest.mark.matrix)]
)
def test_a_rank_s_end_is_the_engine_s(what, code):
    """As a kill from outside, which is no request's fault, or as a crash; also where nothing is told to the rank."""
    done = engine(what)
    assert done.returncode == code, done.stderr
    assert "rank 1 of the model has ended, so the engine ends too" in done.stderr

"""Files in the working directory that have the names of libraries: no process of ours runs one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from e2e.served import Served
from quire_engine.own_modules import module_command
from support.planted_modules import plant, ran, start_all_children

pytestmark = pytest.mark.e2e


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    plant(tmp_path)
    return tmp_path


def test_the_plant_works(hostile: Path) -> None:
    command = [word for word in module_command("quire_server.cli", "version") if word != "-P"]
    subprocess.run(command, cwd=hostile, capture_output=True, check=False)
    assert ran(hostile)


def test_a_server_and_all_its_children(hostile: Path) -> None:
    with Served(cwd=hostile) as server:
        start_all_children(server)
    assert ran(hostile) == []


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--dry-run"),
        ("build-kernels",),
        pytest.param(("verify",), marks=pytest.mark.matrix),  # a minute of checks
        ("simulate", "--help"),
        ("eval-quant", "quire-demo", "--num-threads", "1"),
    ],
    ids=lambda words: words[0],
)
def test_commands_and_their_children(hostile: Path, words: tuple[str, ...]) -> None:
    done = subprocess.run(
        module_command("quire_server.cli", *words),
        cwd=hostile,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert ran(hostile) == []

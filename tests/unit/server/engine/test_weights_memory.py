"""The memory that one engine process hands on to the next: kept when it was finished, not when it was not."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import EngineDead
from quire_server.engine.memory_files import WeightsMemory
from quire_server.engine.supervisor import Supervisor
from support.supervising import run

# An engine that writes down what it was handed, then leaves something there, sealed or not, and ends.
ENGINE = """
import fcntl, os, socket, sys
_, (fd,), _, _ = socket.recv_fds(socket.socket(fileno=int(sys.argv[3])), 1 << 16, 1)
with open(sys.argv[1], "a") as notes:
    notes.write(f"{os.fstat(fd).st_size} {fcntl.fcntl(fd, fcntl.F_GET_SEALS)}\\n")
if not fcntl.fcntl(fd, fcntl.F_GET_SEALS):
    os.write(fd, b"weights")
    if sys.argv[2] == "seal":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
os._exit(3)
"""


def engines_saw(notes: Path, what: str) -> list[str]:
    """What three engines of one supervisor were handed."""

    async def body() -> None:
        program = (sys.executable, "-c", ENGINE, str(notes), what)
        supervisor = Supervisor(EngineConfig(model="none"), program=program)
        for _ in range(3):
            with pytest.raises(EngineDead):
                await supervisor._launch()
        await supervisor.stop()

    run(body)
    return notes.read_text().splitlines()


def test_what_was_sealed_is_handed_on(tmp_path):
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    assert engines_saw(tmp_path / "notes", "seal") == ["0 0", f"7 {seals}", f"7 {seals}"]


def test_what_was_left_unfinished_is_not(tmp_path):
    assert engines_saw(tmp_path / "notes", "leave") == ["0 0", "0 0", "0 0"]


def test_nothing_is_left_when_it_is_closed():
    memory = WeightsMemory()
    fd = memory.for_next_engine()
    assert fd is not None
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_system_without_such_files_has_none(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert WeightsMemory().for_next_engine() is None

"""Exercises hold on a real server, by the command and by servers that it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.served import Served
from quire_lab.exercises import pool
from quire_lab.facts.live import Live

pytestmark = [pytest.mark.e2e]

DEMO = Path(__file__).parents[2] / "engine/quire_engine/demo/quire-demo"
SEVERAL = ("S1.1", "S1.2", "S1.3", "S1.4", "S2.1", "S2.2", "S2.3", "S2.4", "S3.1", "S3.2", "S4.2")
BY_OTHER_COMMANDS = ("S3.3", "S4.1", "S4.4", "S4.5", "S4.6")


def exercises(url: str, *words: str) -> str:
    """What the command prints; it ends with 0."""
    command = [sys.executable, "-m", "quire_lab.exercises", "--url", url, "--model", str(DEMO), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT SO" not in done.stdout
    return done.stdout


def test_exercises_hold_on_a_live_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "blocks.svg"
    with Served("--kv-memory", "8MiB") as server:
        said = exercises(server.url, "--plot", str(picture), *SEVERAL)
        for name in SEVERAL:
            assert f" {name} " in said, name
        assert "262 steps" in said
        assert "peak 16 blocks, step 118" in picture.read_text()
        # The small pool preempts, however busy the machine is: its requests arrive in one pause.
        rows = [line for line in said.splitlines() if " preemptions there " in line or "of a small pool" in line]
        assert len(rows) == 4
        assert all(" ok " in row for row in rows), rows
        # What is expected is not read off the server: another prompt takes other blocks.
        monkeypatch.setattr(pool, "_PREFIX", 100)
        live = Live(server.url)
        begin = live.last_step()
        live.complete(live.prompt(200), 2, n=16, temperature=1)
        facts = pool.copied_on_write(pool.recorded(live, begin), choices=16, block_size=live.block_size)
        assert not facts[0].ok


@pytest.mark.matrix
@pytest.mark.parametrize("seats", ["8", "64", "256"])
def test_every_exercise_holds_at_so_many_seats(seats: str) -> None:
    with Served("--max-num-seqs", seats) as server:
        said = exercises(server.url)
    for name in (*SEVERAL, *BY_OTHER_COMMANDS):
        assert f" {name} " in said, name

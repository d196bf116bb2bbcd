"""Exercises hold on a real server, by the command and by servers that it starts; the others are run by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.served import Served
from quire_bench.exercises import pool
from quire_bench.facts.live import Live

pytestmark = [pytest.mark.e2e]

DEMO = Path(__file__).parents[2] / "engine/quire_engine/demo/quire-demo"
QUICK = ("S1.1", "S2.1", "S2.2", "S2.3", "S3.2")


def test_exercises_hold_on_a_live_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = tmp_path / "blocks.svg"
    with Served("--kv-memory", "8MiB") as server:
        command = [sys.executable, "-m", "quire_bench.exercises", "--url", server.url, "--model", str(DEMO)]
        done = subprocess.run(
            [*command, "--plot", str(picture), *QUICK], capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for name in QUICK:
            assert f" {name} " in done.stdout, name
        assert "NOT SO" not in done.stdout
        assert "262 steps" in done.stdout
        assert "peak 16 blocks, step 118" in picture.read_text()
        # What is expected is not read off the server: another prompt takes other blocks.
        monkeypatch.setattr(pool, "_PREFIX", 100)
        live = Live(server.url)
        begin = live.last_step()
        live.complete(live.prompt(200), 2, n=16, temperature=1)
        facts = pool.copied_on_write(pool.recorded(live, begin), choices=16, block_size=live.block_size)
        assert not facts[0].ok

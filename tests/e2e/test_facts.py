"""Facts on batching hold on a real server, and one that does not is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.served import Served
from quire_lab.facts import batching
from quire_lab.facts.__main__ import main, run
from quire_lab.facts.live import Live

pytestmark = [pytest.mark.e2e]

DEMO = Path(__file__).parents[2] / "engine/quire_engine/demo/quire-demo"
SHORT = ("F1", "F2", "F3", "F4", "F5", "F6", "F7", "F8", "F9", "F10", "F11", "F12", "F13", "F14", "F19")
MINUTES = ("F17", "F18")


def facts(url: str, *names: str) -> str:
    """What the command prints; it ends with 0."""
    command = [sys.executable, "-m", "quire_lab.facts", "--url", url, "--model", str(DEMO), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT SO" not in done.stdout
    return done.stdout


def test_facts_hold_on_a_live_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with Served("--kv-memory", "8MiB") as server:
        said = facts(server.url, *SHORT)
        for number in SHORT:
            assert f" {number} " in said, number
        # What is expected is not read off the server: other lengths fill another share.
        monkeypatch.setattr(batching, "_LONGEST_FIRST", (128, 128, 64, 32))
        found = run(Live(server.url), ["F2"], None)
        assert [fact.ok for fact in found].count(False) >= 2


@pytest.mark.matrix
@pytest.mark.parametrize("seats", ["8", "64", "256"])
def test_every_fact_holds_at_so_many_seats(seats: str) -> None:
    with Served("--max-num-seqs", seats, "--kv-memory", "2MiB") as server:
        said = facts(server.url)
    for number in (*SHORT, *MINUTES):
        assert f" {number} " in said, number


def test_arguments_that_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["F99"])
    assert ended.value.code == 2
    assert "no check of F99" in capsys.readouterr().err
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err

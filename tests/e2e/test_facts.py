"""The facts that need no more than completions and metrics hold on a real server, and one that does not is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.served import Served
from quire_bench.facts import batching
from quire_bench.facts.__main__ import main, run
from quire_bench.facts.live import Live

pytestmark = [pytest.mark.e2e]

DEMO = Path(__file__).parents[2] / "engine/quire_engine/demo/quire-demo"
QUICK = ("F1", "F2", "F8", "F9", "F10", "F12", "F19")


def test_facts_hold_on_a_live_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with Served("--kv-memory", "8MiB") as server:
        command = [sys.executable, "-m", "quire_bench.facts", "--url", server.url, "--model", str(DEMO), *QUICK]
        for _ in range(3):  # requests that are sent together come apart where other processes take the cores
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
            if done.returncode == 0:
                break
        assert done.returncode == 0, done.stdout + done.stderr
        for number in QUICK:
            assert f" {number} " in done.stdout, number
        assert "NOT SO" not in done.stdout
        # What is expected is not read off the server: other lengths fill another share.
        monkeypatch.setattr(batching, "_LONGEST_FIRST", (128, 128, 64, 32))
        facts = run(Live(server.url), ["F2"], None)
        assert [fact.ok for fact in facts].count(False) >= 3


def test_arguments_that_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["F99"])
    assert ended.value.code == 2
    assert "no check of F99" in capsys.readouterr().err
    assert main(["--url", "http://127.0.0.1:9"]) == 1
    assert "does not answer" in capsys.readouterr().err

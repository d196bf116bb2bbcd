"""The official npm `openai` package against a real server: stream, abort, errors."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from e2e.served import Served

HERE = Path(__file__).resolve().parent
INSTALLED = shutil.which("node") is not None and (HERE / "node_modules" / "openai").is_dir()

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not INSTALLED, reason="needs node and the npm package `openai` (make test-e2e installs it)"),
]


def test_stream_abort_and_errors() -> None:
    with Served() as server:
        run = subprocess.run(
            ["node", str(HERE / "openai_check.mjs"), server.url],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        seen = json.loads(run.stdout)
        assert seen["streamed"] == seen["whole"]
        assert seen["finish"] in ("stop", "length")
        assert seen["aborted"]
        assert seen["chunksBeforeAbort"] >= 3
        assert seen["code"] == "model_not_found"
        server.wait_idle()
        assert server.metric("quire_requests_total", outcome="abort") == 1, "it did not run to its end"
        assert server.metric("quire_requests_total", outcome="abort") == 1

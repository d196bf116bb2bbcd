"""The npm packages openai, ai with @ai-sdk/openai-compatible, @anthropic-ai/sdk and ollama."""

from __future__ import annotations

import subprocess
from pathlib import Path

from clients.conftest import KEY
from e2e.served import Served

HERE = Path(__file__).parent


def test_npm_packages(server: Served) -> None:
    done = subprocess.run(
        ["node", "node_check.mjs", server.url, KEY], cwd=HERE, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

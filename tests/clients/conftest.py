"""A server for clients that are installed beside it: `SERVER_PYTHON` is the interpreter that has Quire."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.served import Served

KEY = "test-key"
MODEL = "quire-demo"


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with Served("--api-key", KEY, "--max-model-len", "2048") as served:
        yield served


@pytest.fixture(scope="session")
def base_url(server: Served) -> str:
    """What clients of OpenAI's API are given."""
    return f"{server.url}/v1"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client may ask anybody else: prices, traces and telemetry are off."""
    for name, value in {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGCHAIN_TRACING_V2": "false",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": KEY,
        "ANTHROPIC_API_KEY": KEY,
    }.items():
        monkeypatch.setenv(name, value)

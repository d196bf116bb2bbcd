"""docs/clients.md holds: its scripts print what it shows, and its configurations make each client reach the server.

aider, opencode (in test_agents.py) and Continue's adapter are the programs themselves. Open WebUI and Cline are not
installed: what they are given is used by the openai package, as both of them use it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from clients import page
from e2e.served import Served
from support.documents import text

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"  # of those that pin what others have newer
AIDER = ENVIRONMENTS / "aider" / "bin" / "aider"
PYTHONS = {"LlamaIndex": str(ENVIRONMENTS / "llama-index" / "bin" / "python")}
QUESTION = "What is the capital of Japan?"
ANSWER = "Tokyo"


def test_every_section_is_tried() -> None:
    sections = set(re.findall(r"^## (.*)$", text("docs/clients.md"), re.MULTILINE))
    assert sections == {
        *("LangChain", "LiteLLM", "LlamaIndex"),
        *("Open WebUI", "Cline"),
        *("Continue", "aider", "opencode"),
    }


@pytest.mark.parametrize("client", ["LangChain", "LiteLLM", "LlamaIndex"])
def test_scripts_print_what_is_shown(client: str, server: Served) -> None:
    code, shown = page.script(client, server)
    python = PYTHONS.get(client, sys.executable)
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == shown


def asks_as_the_openai_package_does(base_url: str, key: str, model: str) -> str:
    """The answer over a stream, once the model is seen in the list that fills a client's menu."""
    with openai.OpenAI(base_url=base_url, api_key=key) as api:
        assert model in {each.id for each in api.models.list()}
        chunks = api.chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], temperature=0, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_open_webui(server: Served) -> None:
    variables, words = page.commands("Open WebUI", server)
    assert words[:2] == ["docker", "run"]
    assert words[words.index("--network") + 1] == "host", "a container reaches 127.0.0.1 only there"
    told = asks_as_the_openai_package_does(variables["OPENAI_API_BASE_URL"], variables["OPENAI_API_KEY"], "quire-demo")
    assert ANSWER in told


def test_cline(server: Served) -> None:
    fields = page.fields("Cline", server)
    told = asks_as_the_openai_package_does(fields["Base URL"], fields["OpenAI Compatible API Key"], fields["Model ID"])
    assert ANSWER in told


def test_continue(server: Served) -> None:
    (configured,) = page.configuration("Continue", server)["models"]
    done = subprocess.run(
        ["node", "continue_check.mjs", json.dumps(configured), QUESTION],
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    whole, streamed = json.loads(done.stdout)
    assert ANSWER in whole
    assert streamed == whole


def test_aider(server: Served, tmp_path: Path) -> None:
    """In its mode for questions, whose instructions fit the embedded model's context."""
    variables, (program, *words) = page.commands("aider", server)
    assert program == "aider"
    quiet = "--no-git --no-gitignore --no-check-update --no-pretty --no-show-model-warnings --analytics-disable"
    done = subprocess.run(
        [
            str(AIDER),
            *words,
            *quiet.split(),
            "--yes-always",
            "--chat-mode",
            "ask",
            "--map-tokens",
            "0",
            "--message",
            QUESTION,
        ],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ANSWER in done.stdout

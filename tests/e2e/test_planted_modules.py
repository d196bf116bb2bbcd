"""Files in the working directory that have the names of libraries: no process of ours runs one."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx
import pytest

from e2e.served import Served
from quire_engine.own_modules import module_command

pytestmark = pytest.mark.e2e

OURS = ("quire", "quire_server", "quire_engine", "quire_kernels", "quire_bench")
STANDARD = ("json", "random", "string", "queue", "types", "site", "sitecustomize", "usercustomize")
LONG = "a word and " * 30_000  # long enough for a process of its own


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with a module of each name that could be imported; one that runs leaves its name behind."""
    installed = [name for name in packages_distributions() if name.isidentifier() and not name.startswith("_")]
    for name in (*installed, *OURS, *STANDARD):
        marker = f"open({str(tmp_path / 'ran.txt')!r}, 'a').write({name!r} + chr(10))"
        (tmp_path / f"{name}.py").write_text(f"{marker}\nraise SystemExit(99)\n")
    assert {"torch", "numpy", "msgspec", "tokenizers", "jinja2"} <= set(installed)
    return tmp_path


def ran(folder: Path) -> list[str]:
    marker = folder / "ran.txt"
    return sorted(set(marker.read_text().split())) if marker.exists() else []


def test_the_plant_works(hostile: Path) -> None:
    command = [word for word in module_command("quire_server.cli", "version") if word != "-P"]
    subprocess.run(command, cwd=hostile, capture_output=True, check=False)
    assert ran(hostile)


def test_a_server_and_all_its_children(hostile: Path) -> None:
    """The engine, its successor, and the processes for templates, grammars and long texts."""
    with Served(cwd=hostile) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        chat = {"model": "quire-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        schema = {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        answers = [
            client.post("/v1/chat/completions", json=chat),
            client.post(
                "/v1/chat/completions", json=chat | {"response_format": {"type": "json_schema", "json_schema": schema}}
            ),
            client.post("/tokenize", json={"model": "quire-demo", "prompt": LONG}),
        ]
        server.engine().kill()
        answers.append(client.post("/v1/chat/completions", json=chat))
        assert [answer.status_code for answer in answers] == [200] * 4
    assert ran(hostile) == []


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--dry-run"),
        ("build-kernels",),
        ("verify",),
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

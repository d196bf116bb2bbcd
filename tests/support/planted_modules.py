"""A folder with a module of each name that could be imported, and what a server does that starts all its children.

Promises: a planted module that runs leaves its name behind, and ends its process. Must not know: who starts what.
"""

from __future__ import annotations

from importlib.metadata import packages_distributions
from pathlib import Path

import httpx

from e2e.served import Served

OURS = ("quire", "quire_server", "quire_engine", "quire_kernels", "quire_bench", "quire_lab")
STANDARD = ("json", "random", "string", "queue", "types", "site", "sitecustomize", "usercustomize")
LONG = "a word and " * 30_000  # long enough for a process of its own


def plant(folder: Path) -> int:
    """Plant the modules; how many they are."""
    installed = [name for name in packages_distributions() if name.isidentifier() and not name.startswith("_")]
    assert {"torch", "numpy", "msgspec", "tokenizers", "jinja2"} <= set(installed)
    names = (*installed, *OURS, *STANDARD)
    for name in names:
        marker = f"open({str(folder / 'ran.txt')!r}, 'a').write({name!r} + chr(10))"
        (folder / f"{name}.py").write_text(f"{marker}\nraise SystemExit(99)\n")
    return len(names)


def ran(folder: Path) -> list[str]:
    """The names of the planted modules that have run."""
    marker = folder / "ran.txt"
    return sorted(set(marker.read_text().split())) if marker.exists() else []


def start_all_children(server: Served) -> None:
    """The engine, its successor, and the processes for templates, grammars and long texts, each at work."""
    chat = {"model": "quire-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    schema = {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    constrained = chat | {"response_format": {"type": "json_schema", "json_schema": schema}}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        answers = [client.post("/v1/chat/completions", json=body) for body in (chat, constrained)]
        answers.append(client.post("/tokenize", json={"model": "quire-demo", "prompt": LONG}))
        server.engine().kill()
        answers.append(client.post("/v1/chat/completions", json=chat))
    assert [answer.status_code for answer in answers] == [200] * 4

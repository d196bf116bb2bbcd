"""The path of a streamed chat request, walked as the documents tell it; and how many functions a token crosses."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from quire_server.app import create_app
from quire_server.engine.supervisor import Supervisor
from quire_server.settings import Settings
from quire_server.state import build_state
from support.call_trace import WHICH_TOKEN, Trace
from support.documents import ROOT, section

TRACED = ROOT / "tests/support/call_trace.py"
SECTION = section("docs/architecture.md", "One request, from the socket to its last token")
PATH = re.findall(r"^\| `(quire_[\w.]+)` \|", SECTION, re.MULTILINE)
SERVER_ASIDE = ("quire_server.metrics.",)  # metrics are taken by the side
BODY = {
    "model": "quire-demo",
    "messages": [{"role": "user", "content": "Tell me a short story."}],
    "stream": True,
    "temperature": 0,
    "max_tokens": 12,
}


async def walk(report: Path) -> Trace:
    """One streamed chat through the application, the supervisor and a real engine process; the server half's trace."""
    # What looks for thoughts and calls is passed by those replies alone that may have them.
    settings = Settings(kv_memory="16MiB", max_num_seqs=4, num_threads=1)
    supervisor = Supervisor(settings.engine_config(), program=(sys.executable, str(TRACED), str(report)))
    starting = asyncio.create_task(supervisor.start())
    state = await build_state(settings, supervisor, starting)
    app = create_app(state)
    body = json.dumps(BODY).encode()
    trace, frames, ended = Trace(aside=SERVER_ASIDE), 0, asyncio.Event()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, object]:
        if incoming:
            return incoming.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        nonlocal frames
        if message["type"] != "http.response.body":
            return
        frames += 1
        if frames == WHICH_TOKEN:
            trace.begin()
        elif frames == WHICH_TOKEN + 1:
            trace.end()
        if not message.get("more_body"):
            ended.set()

    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    sys.setprofile(trace)
    try:
        await app(scope, receive, send)
    finally:
        sys.setprofile(None)
        await supervisor.stop()
        state.model_text.close()
    assert frames > WHICH_TOKEN + 1, "too short a stream to look at"
    return trace


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], list[str]]]:
    """By half: all functions in the order of their first call, and those that one token crossed."""
    report = tmp_path_factory.mktemp("trace") / "engine.json"
    server = asyncio.run(walk(report))
    engine = json.loads(report.read_text())
    return {"server": (list(server.calls), list(server.token)), "engine": (engine["calls"], engine["token"])}


def test_the_table_names_functions_that_exist():
    assert len(PATH) > 15
    for name in PATH:
        assert callable(resolve_name(name)), name


@pytest.mark.matrix  # that the functions exist: above
def test_the_table_is_the_path(walked: dict[str, tuple[list[str], list[str]]]):
    """Every function of the table is called, and in each half in the table's order."""
    for half, (calls, _) in walked.items():
        named = [name for name in PATH if name.startswith("quire_server") == (half == "server")]
        missing = [name for name in named if name not in calls]
        assert not missing, f"not on the path of the {half}"
        assert named == sorted(named, key=calls.index)


@pytest.mark.matrix
def test_a_token_crosses_each_function_once(walked: dict[str, tuple[list[str], list[str]]]):
    crossed = [name for _, token in walked.values() for name in token]
    print(f"a streamed token crosses {len(crossed)} functions:", *crossed, sep="\n  ")
    assert len(crossed) == len(set(crossed))

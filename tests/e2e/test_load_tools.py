"""What outside load tools send and how they read the reply, and the official npm `openai` package.

`vllm bench serve` and guidellm time the events of a stream: the first with choices is the first token, each later one a
gap, and the counts come from `usage`. Both need packages too large to install here; their requests and their reading
are written after their documents and what a run of guidellm was seen to send.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.served import Served

pytestmark = pytest.mark.e2e

HERE = Path(__file__).resolve().parent
NODE = shutil.which("node") is not None and (HERE / "node_modules" / "openai").is_dir()
TOKENS = 64
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
BENCH: dict[str, Any] = {
    "model": "quire-demo",
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
REQUESTS = {
    "vllm bench, completions": ("/v1/completions", BENCH | {"prompt": "Once upon a time", "max_tokens": TOKENS}),
    "vllm bench, chat": (
        "/v1/chat/completions",
        BENCH
        | {"messages": [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}]}
        | {"max_completion_tokens": TOKENS, "logprobs": None},
    ),
    "guidellm": (
        "/v1/chat/completions",
        {
            "model": "quire-demo",
            "messages": MESSAGES,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": TOKENS,
            "max_tokens": TOKENS,
            "stop": None,
            "ignore_eos": True,
        },
    ),
}


@dataclass
class Measured:
    """As such a tool counts."""

    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    done: bool = False

    def read(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        now, event = time.perf_counter(), json.loads(data)
        if event["choices"]:
            (choice,) = event["choices"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            if self.first is None:
                self.first = self.latest = now
            else:
                self.gaps.append(now - self.latest)
                self.latest = now
            self.text += text or ""
        if event.get("usage"):
            self.usage = event["usage"]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served() as served:
        yield served


@pytest.mark.parametrize("name", REQUESTS)
def test_a_load_tool_reads_true_counts(name: str, server: Served) -> None:
    path, body = REQUESTS[name]
    measured = Measured()
    with httpx.Client(base_url=server.url, timeout=60) as http:
        with http.stream("POST", path, json=body, headers={"x-request-id": "bench-0"}) as reply:
            assert reply.status_code == 200
            assert reply.headers["x-request-id"] == "bench-0"
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    measured.read(line.removeprefix("data: "))
        whole = http.post(path, json=body | {"stream": False, "stream_options": None}).json()
    assert measured.done
    assert measured.usage["completion_tokens"] == TOKENS
    assert measured.usage == whole["usage"] | {"prompt_tokens_details": measured.usage["prompt_tokens_details"]}
    choice = whole["choices"][0]
    if body.get("temperature") == 0:  # guidellm leaves it to the server
        assert measured.text == (choice["text"] if "text" in choice else choice["message"]["content"])
    # A token each, and the chat's first event, which has the role; where the server is behind, one has several.
    assert measured.first is not None
    assert 1 <= len(measured.gaps) <= TOKENS + 1


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics", "/version"])
def test_what_load_tools_ask_before_they_begin(path: str, server: Served) -> None:
    assert httpx.get(server.url + path).status_code == 200


@pytest.mark.skipif(not NODE, reason="needs node and the npm package `openai` (make test-e2e installs it)")
def test_the_npm_package_streams_aborts_and_tells_errors(server: Served) -> None:
    command = ["node", str(HERE / "openai_check.mjs"), server.url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["streamed"] == seen["whole"]
    assert seen["finish"] in ("stop", "length")
    assert seen["aborted"]
    assert seen["chunksBeforeAbort"] >= 3
    assert seen["code"] == "model_not_found"
    server.wait_idle()
    assert server.metric("quire_requests_total", outcome="abort") == 1, "it did not run to its end"

"""`quire serve` from outside: what it prints works, how it ends, what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from e2e.served import LIMITED, Served
from support.start_signals import MOMENTS, signal_at

pytestmark = pytest.mark.e2e


class Stream(threading.Thread):
    """One streamed completion that would run for long; collects its events."""

    def __init__(self, server: Served, max_tokens: int = 1900) -> None:
        super().__init__()
        self._url = f"{server.url}/v1/completions"
        self._body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.events: list[str] = []
        self._begun = threading.Event()
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self._begun.set()

    def wait_begun(self) -> None:
        assert self._begun.wait(30), "no event came"


def ended(server: Served, children: list[psutil.Process], seconds: float) -> int:
    """The exit code; nothing that the server started may outlive it."""
    code = server.process.wait(seconds)
    _, alive = psutil.wait_procs(children, timeout=120)
    assert not alive
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) != 0
    return code


def children_of(server: Served) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def test_it_says_what_it_serves_and_what_requests_leave_out_and_the_printed_call_works() -> None:
    own = {"temperature": 0, "top_k": 20, "max_new_tokens": 12}
    with Served("--override-generation-config", json.dumps(own)) as server:
        for words in ("KV cache", "weights", "sequences of 2,048 tokens"):
            assert words in server.log()
        said = [line for line in server.log().splitlines() if "loading the model" not in line]
        numbers = "temperature 0, top_k 20, max_tokens 12"
        assert said[3].endswith(f"; defaults of requests: {numbers} (from --override-generation-config)")
        assert "try: curl" in said[4]
        assert len(said) == 5, "every model starts with as many lines"
        (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert model["default_sampling_params"] == {"temperature": 0, "top_k": 20, "max_tokens": 12}
        replies = []
        for asked in ({}, {"temperature": 0}, {"max_completion_tokens": 30}):
            body = {"messages": [{"role": "user", "content": "Tell me a long story."}], **asked}
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            assert reply["usage"]["completion_tokens"] <= 12
            replies.append(reply["choices"][0]["message"]["content"])
        assert replies == replies[:1] * 3
        command = re.search(r"try: (curl .*)", server.log())
        assert command is not None
        if shutil.which("curl") is None:
            pytest.skip("needs curl")
        reply = subprocess.run(shlex.split(command[1]), capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(reply.stdout)["choices"][0]["message"]["content"]


def test_work_longer_than_the_drain_ends_with_an_error_event() -> None:
    with Served("--drain-timeout", "0.5", "--kv-memory", "64MiB") as server:
        children = children_of(server)
        streams = [Stream(server) for _ in range(3)]
        for stream in streams:
            stream.wait_begun()
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, children, 90) == 0
        assert time.monotonic() - started < 0.5 + 60
        for stream in streams:
            stream.join(10)
            assert stream.events[-1] == "[DONE]"
            assert "error" in json.loads(stream.events[-2])
            assert json.loads(stream.events[0])["choices"]


def test_an_engine_that_keeps_dying_ends_the_server_with_70() -> None:
    with Served("--set", "max_engine_restarts=1", "--kv-memory", "64MiB") as server:
        children = children_of(server)
        stream = Stream(server)
        stream.wait_begun()
        deadline = time.monotonic() + 300
        while server.process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may go while we look
                for child in children_of(server):
                    if "quire_engine.process" in child.cmdline():
                        child.kill()
            time.sleep(0.05)
        assert ended(server, children, 90) == 70
        stream.join(10)
        assert stream.events[-1] == "[DONE]"
        assert "error" in json.loads(stream.events[-2])
        assert "giving up" in server.log()
        assert "Traceback" not in server.log()


def signals_at(moments: Sequence[str]) -> Iterator[Any]:
    """Each moment with one of the two signals, by turns; `make e2e-matrix` takes the other one."""
    for place, moment in enumerate(moments):
        for turn, number in enumerate((signal.SIGINT, signal.SIGTERM)):
            marks = [] if place % 2 == turn else pytest.mark.matrix
            yield pytest.param(moment, number, marks=marks, id=f"{number.name}-{moment}")


@pytest.mark.parametrize(("moment", "number"), list(signals_at(MOMENTS)))
def test_a_signal_at_any_moment_of_a_start_ends_it_in_one_line(moment: str, number: signal.Signals) -> None:
    assert signal_at(moment, number).split()[0] in {"0", str(128 + number)}


def test_a_unix_socket_and_json_logs_with_the_requests_id(tmp_path: Path) -> None:
    path, log = tmp_path / "quire.sock", tmp_path / "log"
    with log.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, LIMITED, "log_stats_interval=0.2", "serve", "--uds", str(path), "--log-format", "json"],
            stdout=written,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://quire") as client:
            deadline = time.monotonic() + 300
            while True:
                try:
                    reply = client.get("/health/ready")
                    if reply.status_code == 200:
                        break
                    assert reply.json()["error"]["code"] == "loading"
                except httpx.TransportError:
                    pass
                assert time.monotonic() < deadline
                time.sleep(0.05)
            named = {"x-request-id": "mine-1"}
            assert client.get("/v1/models", headers=named).json()["data"][0]["id"] == "quire-demo"
            body = {"prompt": "Once", "max_tokens": 64, "ignore_eos": True}
            client.post("/v1/completions", json=body, timeout=60).raise_for_status()
            while "Avg generation throughput" not in log.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
    finally:
        process.terminate()
        assert process.wait(20) == 0
    assert not path.exists()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(record.get("request_id") == "mine-1" and record["status"] == 200 for record in records)
    assert {record["level"] for record in records} == {"info"}

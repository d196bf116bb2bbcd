"""A long system prompt survives restarts of the engine and of the server, ended politely and by `kill -9`, on a CPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from e2e.served import Served

pytestmark = pytest.mark.e2e

SYSTEM = [300 + 7 * position % 1999 for position in range(2000)]
BLOCKS = len(SYSTEM) // 16


def ask(server: Served, *question: int) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt were found."""
    prompt = [*SYSTEM, *question]
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply: dict[str, Any] = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    return reply["choices"][0]["token_ids"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def kept(server: Served) -> float:
    """The blocks in files, once all of the prompt's are there."""
    deadline = time.monotonic() + 300
    while (count := server.metric("quire_kept_kv_blocks")) < BLOCKS and time.monotonic() < deadline:
        time.sleep(0.05)
    return count


def kill_all(server: Served) -> None:
    """`kill -9` of the server and of all that it has started, at once."""
    parent = psutil.Process(server.process.pid)
    for process in [parent, *parent.children(recursive=True)]:
        os.kill(process.pid, signal.SIGKILL)
    server.process.wait(10)


def hardly_computes(server: Served, expected: list[int]) -> None:
    before = server.metric("quire_engine_computed_tokens_total", kind="prefill")
    assert ask(server, 5) == (expected, len(SYSTEM))
    assert server.metric("quire_engine_computed_tokens_total", kind="prefill") - before < 0.05 * len(SYSTEM)


def test_a_system_prompt_survives_kills_and_restarts(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    flags = ("--kv-offload-dir", str(folder), "--log-level", "debug")
    with Served(*flags) as server:
        expected, cached = ask(server, 5)
        assert (len(expected), cached) == (12, 0)  # all of it was computed
        assert kept(server) == BLOCKS
        os.kill(server.engine().pid, signal.SIGKILL)  # the supervisor starts another one
        hardly_computes(server, expected)
        kill_all(server)
    with Served(*flags) as server:
        assert "kept prefixes" in server.log()
        hardly_computes(server, expected)
        assert server.metric("quire_kept_kv_block_events_total", event="read") == BLOCKS
    # Ended by SIGTERM. Now one file is cut off, and another one is changed.
    files = sorted(folder.glob("*/*.kv"), key=lambda path: -path.stat().st_mtime_ns)  # in the prompt's order
    assert len(files) == BLOCKS
    files[100].write_bytes(files[100].read_bytes()[:-1])
    files[110].write_bytes(files[110].read_bytes()[:-1] + b"?")
    with Served(*flags) as server:
        assert ask(server, 5) == (expected, 100 * 16)
        assert server.log().count("damaged, foreign or gone: it is computed, and removed") == 1
        assert server.metric("quire_kept_kv_block_events_total", event="refused") == 1

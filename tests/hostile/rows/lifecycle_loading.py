"""What a server answers while its model is loaded, and when that fails.

Promises: a server of its own, whose engine takes its time; the one that the command starts is not used. Must not know:
how the engine loads.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx

from e2e.served import Served
from hostile.row import Row

SLOW = Path(__file__).parents[2] / "support" / "slow_serve.py"
LOAD_SECONDS = 4.0
_LISTENS = re.compile(r"listening on (http://127\.0\.0\.1:\d+);")


class Loading:
    """A server whose engine takes so long to load."""

    def __init__(self, seconds: str) -> None:
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115  # closed in `end`
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, str(SLOW), seconds, "--port", "0", "--kv-memory", "64MiB"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )

    def log(self) -> str:
        return Path(self._log.name).read_text()

    async def address(self) -> str:
        while (found := _LISTENS.search(self.log())) is None:
            assert self.process.poll() is None, self.log()
            await asyncio.sleep(0.02)
        return found[1]

    def end(self) -> int:
        self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self._log.close()


async def slow_start(server: Served) -> str:
    del server
    loading = Loading(str(LOAD_SECONDS))
    try:
        url = await loading.address()
        listening = time.monotonic() - loading.started
        counts: Counter[str] = Counter()
        percents: list[float] = []
        slowest = 0.0
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            while True:
                began = time.monotonic()
                live = (await client.get("/health/live")).status_code
                slowest = max(slowest, time.monotonic() - began)
                assert live == 200
                ready = await client.get("/health/ready")
                if ready.status_code == 200:
                    break
                assert ready.json()["error"]["code"] == "loading", ready.text
                if (percent := ready.json()["progress"]["percent"]) is not None:
                    percents.append(percent)
                asked = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
                counts[f"completions {asked.status_code}"] += 1
                assert asked.status_code in {200, 503}, asked.text
                assert asked.status_code == 200 or asked.headers["retry-after"]
                metrics = await client.get("/metrics")
                assert "quire_load_progress_ratio" in metrics.text
                await asyncio.sleep(0.05)
            ready_seconds = time.monotonic() - loading.started
            served = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert served.status_code == 200
        assert percents == sorted(percents)
        assert percents
        assert percents[-1] > percents[0]
        told = ", ".join(f"{n} x {what}" for what, n in counts.items())
        return (
            f"listens after {listening:.1f} s, ready after {ready_seconds:.1f} s; {told}; live 200, slowest"
            f" {slowest * 1000:.0f} ms; progress {percents[0]:.0f} to {percents[-1]:.0f} %"
        )
    finally:
        loading.end()


async def failed_start(server: Served) -> str:
    del server
    loading = Loading("1:fail")
    try:
        url = await loading.address()
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            assert (await client.get("/health/live")).status_code == 200
        code = await asyncio.to_thread(loading.process.wait, 30)
        lines = loading.log().splitlines()
        assert code == 1, loading.log()
        assert lines[-1] == "quire serve: model.safetensors is missing", loading.log()
        assert "Traceback" not in loading.log()
        return f"exit {code}: {lines[-1]}"
    finally:
        loading.end()


ROWS = (
    Row(name="slow-start", what="requests while the model is loaded", act=slow_start, flags=("--kv-memory", "64MiB")),
    Row(name="failed-start", what="a model that cannot be loaded", act=failed_start, flags=("--kv-memory", "64MiB")),
)

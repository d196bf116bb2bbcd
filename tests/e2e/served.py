"""A real `quire serve` on 127.0.0.1 and a free port, started for a test and stopped by its process id."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx
import psutil

START_SECONDS = 300.0
STOP_SECONDS = 300.0
PYTHON = "SERVER_PYTHON"  # names the interpreter; to a server it would be a setting that there is not
LIMITED = Path(__file__).parents[1] / "support" / "limited.py"
_ADDRESS = re.compile(r"Uvicorn running on (https?://127\.0\.0\.1:\d+)")


class Served:
    """`with Served("--max-num-seqs", "8") as server: httpx.get(server.url + "/health")`.

    `limits` are those that no flag sets, such as `header_timeout=2,step_log=256`.
    """

    def __init__(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        limits: str = "",
        cwd: Path | None = None,
        start_seconds: float = START_SECONDS,
        program: tuple[str, ...] = (),
    ) -> None:
        """`program`: what runs instead of `quire serve`, with the same arguments."""
        self._args, self._cwd, self._start_seconds = args, cwd, start_seconds
        # -P, as for the `quire` that is installed: nothing in the working directory is imported.
        self._program = program or ("-P", "-m", "quire_server.cli", "serve")
        if limits:
            self._program = (str(LIMITED), limits, "serve")
        self._env = env or {}
        self.url = ""
        self.ready_seconds = 0.0

    def __enter__(self) -> Served:
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # closed in __exit__
        started = time.monotonic()
        self.process = subprocess.Popen(
            # Where the tests of a client run in an environment of its own, the server's is named.
            [
                os.environ.get(PYTHON, sys.executable),
                *self._program,
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                *self._args,
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=self._cwd,
            env={name: value for name, value in {**os.environ, **self._env}.items() if name != PYTHON},
        )
        try:
            self._wait_until_ready(started)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def _wait_until_ready(self, started: float) -> None:
        while time.monotonic() < started + self._start_seconds:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with {self.process.returncode}:\n{self.log()}")
            if not self.url and (match := _ADDRESS.search(self.log())):
                self.url = match[1]
            if self.url:
                try:
                    if httpx.get(self.url + "/health/ready", timeout=2, verify=False).status_code == 200:
                        self.ready_seconds = time.monotonic() - started
                        return
                except httpx.TransportError:
                    pass
            time.sleep(0.02)
        raise TimeoutError(f"not ready after {self._start_seconds} s:\n{self.log()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if error is not None:
            print(self.log()[-8000:])
        self._log.close()

    def log(self) -> str:
        """What the server has printed so far."""
        return Path(self._log.name).read_text()

    def engine(self) -> psutil.Process:
        """The engine process that runs now: the oldest one, since a spare comes after its engine."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            engines: list[psutil.Process] = []
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.status() != psutil.STATUS_ZOMBIE and any("quire_engine" in a for a in child.cmdline()):
                        engines.append(child)
            if engines:
                return min(engines, key=psutil.Process.create_time)
            time.sleep(0.02)
        raise TimeoutError("no engine process")

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; 0 when it has none yet. Labels given must match, others are summed."""
        return sample(self.url + "/metrics", name, **labels)

    def wait_idle(self, seconds: float = 300.0) -> None:
        """Until nothing runs or waits and every block is free or cached."""
        deadline = time.monotonic() + seconds
        while True:
            running = self.metric("quire_requests_running")
            waiting = self.metric("quire_requests_waiting")
            used = self.metric("quire_kv_blocks", state="used")
            if running == waiting == used == 0:
                break
            if time.monotonic() > deadline:
                raise AssertionError(f"not idle after {seconds} s: {running=} {waiting=} {used=}")
            time.sleep(0.05)
        free, cached = self.metric("quire_kv_blocks", state="free"), self.metric("quire_kv_blocks", state="cached")
        assert free + cached == self.metric("quire_kv_pool_blocks")


def sample(url: str, name: str, **labels: str) -> float:
    """One sample of an exposition; 0 when it has none yet. Labels given must match, others are summed."""
    total = 0.0
    for line in httpx.get(url, timeout=120, verify=False).text.splitlines():
        match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
        if match and match[1] == name:
            found = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            if all(found.get(key) == value for key, value in labels.items()):
                total += float(match[3])
    return total

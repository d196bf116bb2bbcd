"""A real `quire engine` on 127.0.0.1 and a free port, started for a test and stopped by its process id."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from e2e.served import LIMITED, PYTHON, START_SECONDS, STOP_SECONDS

_ADDRESS = re.compile(r"a node listens on (127\.0\.0\.1:\d+)")


class ServedNode:
    """`with ServedNode() as node: Served("--engines", node.address)`. It may be started again at the same address.

    `limits` are those that no flag sets, as of `Served`.
    """

    def __init__(self, *args: str, limits: str = "") -> None:
        self._args = args
        self._program = (str(LIMITED), limits) if limits else ("-P", "-m", "quire_server.cli")
        self.address = ""

    def __enter__(self) -> ServedNode:
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # closed in __exit__
        self.start()
        return self

    def start(self) -> None:
        """Start it, and wait until it listens; its model is loaded meanwhile."""
        seen = len(self.log())
        self.process = subprocess.Popen(
            [
                os.environ.get(PYTHON, sys.executable),
                *(*self._program, "engine", "--listen", self.address or "127.0.0.1:0"),
                *self._args,
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != PYTHON},
        )
        deadline = time.monotonic() + START_SECONDS
        while (match := _ADDRESS.search(self.log(), seen)) is None:
            if self.process.poll() is not None:
                raise RuntimeError(f"the node exited with {self.process.returncode}:\n{self.log()}")
            if time.monotonic() > deadline:
                self.stop(signal.SIGKILL)
                raise TimeoutError(f"does not listen after {START_SECONDS} s:\n{self.log()}")
            time.sleep(0.02)
        self.address = match[1]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal that ends it, and wait for that; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            print(self.log()[-6000:])
        self._log.close()

    def log(self) -> str:
        """What it has printed so far."""
        return Path(self._log.name).read_text()

"""The real engine process after a load that takes as long as it is told, with progress: what does a server meanwhile?

`python slow_engine.py SECONDS FD PARENT_PID`, or SECONDS:fail for one that cannot load its model in the end.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "engine"), str(ROOT / "kernels"), str(ROOT / "tests")]

from quire_engine.process.__main__ import main  # noqa: E402
from quire_engine.process.transport import LoadProgress, StartFailed, encode_frame  # noqa: E402

TOTAL = 1000
TOLD = 20  # times


def load(seconds: float, fd: int, *, fails: bool) -> None:
    with socket.socket(fileno=os.dup(fd)) as connection:
        for step in range(TOLD):
            done = TOTAL * (step + 1) // TOLD
            connection.sendall(encode_frame(LoadProgress(phase="reading weights", done=done, total=TOTAL)))
            time.sleep(seconds / TOLD)
        if fails:
            connection.sendall(encode_frame(StartFailed(kind="model", message="model.safetensors is missing")))
            sys.exit(1)


if __name__ == "__main__":
    seconds, _, fails = sys.argv[1].partition(":")
    load(float(seconds), int(sys.argv[2]), fails=bool(fails))
    main(int(sys.argv[2]), int(sys.argv[3]))

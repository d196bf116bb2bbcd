"""`quire serve` with an engine that takes its time to load: `python slow_serve.py SECONDS[:fail] [flags]`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "server"), str(ROOT / "engine"), str(ROOT / "kernels")]

from quire_server.commands import serve  # noqa: E402
from quire_server.programs import launch  # noqa: E402

ENGINE = Path(__file__).with_name("slow_engine.py")

if __name__ == "__main__":
    program = (sys.executable, str(ENGINE), sys.argv[1])
    launch.Supervisor = functools.partial(launch.Supervisor, program=program)  # type: ignore[assignment,misc]
    sys.exit(serve.run(sys.argv[2:]))

"""`quire serve` and `quire engine` with limits that no flag sets: `python limited.py step_log=256 serve [flags]`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "server"), str(ROOT / "engine"), str(ROOT / "kernels")]

from quire_engine.contract.limits import SchedulerLimits  # noqa: E402
from quire_server.commands import engine, serve  # noqa: E402
from quire_server.engine.restart_policy import RestartPolicy  # noqa: E402
from quire_server.settings import ServerLimits  # noqa: E402


def change_default(name: str, value: str) -> None:
    """Of the one record that has such a field. Raises LookupError."""
    for record in (ServerLimits, SchedulerLimits, RestartPolicy):
        defaults = record.__init__.__kwdefaults__
        if name in defaults:
            defaults[name] = type(defaults[name])(value)
            return
    raise LookupError(f"there is no limit {name}")


if __name__ == "__main__":
    for text in sys.argv[1].split(","):
        change_default(*text.split("="))
    sys.exit({"serve": serve, "engine": engine}[sys.argv[2]].run(sys.argv[3:]))

"""An API server's process: `python -m quire_server.api_servers FD PARENT_PID`."""

from __future__ import annotations

import sys

from quire_engine.machine import die_with_parent, leave_signals_to_parent


def main(fd: int, parent_pid: int) -> int:
    """Serve until the main process says so or is gone."""
    leave_signals_to_parent()
    die_with_parent(parent_pid)
    from quire_server.api_servers.server import run  # noqa: PLC0415 - signals are the main process's from the first moment

    return run(fd)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))

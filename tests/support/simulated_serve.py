"""`quire serve` whose engine finds the GPU of `simulated_paths`: `python -m support.simulated_serve FAULTS [flags]`.

FAULTS is JSON: the kind of the fault planted in a path, by the path's name. Must not know: torch.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping

from quire_server.commands import serve
from quire_server.programs import launch


def program(faults: Mapping[str, str]) -> tuple[str, ...]:
    """What follows the interpreter, before the server's flags."""
    return ("-P", "-m", "support.simulated_serve", json.dumps(faults))


if __name__ == "__main__":
    engine = (sys.executable, "-P", "-m", "support.simulated_paths", "engine", sys.argv[1])
    launch.Supervisor = functools.partial(launch.Supervisor, program=engine)  # type: ignore[assignment,misc]
    sys.exit(serve.run(sys.argv[2:]))

"""The engine process from its START frame to its loop."""

import socket
import subprocess
import sys

from quire_engine.config import EngineConfig
from quire_engine.process.transport import encode_frame
from support.checkpoints import shared_checkpoint

LOOK = """
import gc, os, sys
from quire_engine.process import __main__ as process
from quire_engine.process.loop import EngineLoop
import quire_engine.build as build
load = build.build
def watched(config, **more):
    print("loading", gc.isenabled())
    return load(config, **more)
build.build = watched
EngineLoop.run = lambda loop, early: print("serving", gc.isenabled(), gc.get_freeze_count() > 10_000)
process.main(int(sys.argv[1]), os.getppid())
"""


def test_garbage_is_looked_for_once_the_engine_serves() -> None:
    """Not while it loads; and never again among what was loaded."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(EngineConfig(model=str(shared_checkpoint()), kv_memory=1 << 20)))
        done = subprocess.run(
            [sys.executable, "-c", LOOK, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    assert done.stdout.splitlines() == ["loading False", "serving True True"]

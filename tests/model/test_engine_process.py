"""The engine process from its START frame to its loop."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.machine import PARENTS_SIGNALS
from quire_engine.process.transport import encode_frame
from quire_server.engine.process import EngineProcess
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
def serve(loop, early):
    print("serving", loop._garbage, gc.isenabled(), gc.get_freeze_count() > 10_000)
    print("transformers" in sys.modules)
EngineLoop.run = serve
process.main(int(sys.argv[1]), os.getppid())
"""


def test_a_start_collects_no_garbage_and_does_not_import_transformers() -> None:
    """Garbage is looked for between steps alone, and never again among what was loaded."""
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
    loading, serving, needs_transformers = done.stdout.splitlines()
    assert loading == "loading False"
    assert re.fullmatch("serving <quire_engine.process.loop.Garbage object at .*> False True", serving)
    assert needs_transformers == "False"


WAITS = "ShdPnd", "SigPnd", "SigBlk"  # pending, or blocked


@pytest.mark.parametrize("number", sorted(PARENTS_SIGNALS))
def test_a_signal_to_its_parent_does_not_end_it_however_early_it_comes(number: signal.Signals) -> None:
    async def launch() -> None:
        process = EngineProcess([sys.executable, "-P", "-m", "quire_engine.process"], lambda step: None)
        try:
            os.kill(process.pid or 0, number)  # its interpreter has not begun
            async with asyncio.timeout(300):
                while not _has(process.pid, number, "SigIgn") or _has(process.pid, number, *WAITS):
                    assert process.runs, process.ending
                    await asyncio.sleep(0.01)
            assert process.runs
        finally:
            process.close()
            await process.reap(grace_seconds=0.0)

    asyncio.run(launch())


def _has(pid: int | None, number: signal.Signals, *fields: str) -> bool:
    """Whether a signal stands in one of these sets of a process."""
    with open(f"/proc/{pid}/status") as status:
        sets = [int(line.split()[1], 16) for line in status if line.startswith(fields)]
    return any(each >> (number - 1) & 1 for each in sets)

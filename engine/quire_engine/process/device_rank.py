"""A rank on a device of its own: `python -m quire_engine.process.device_rank RANK PARENT_PID`.

Owns the process: its death with the parent, its replies. It reads the configuration, replies `resolved`; loads the
weights beside all other ranks, replies with the bytes of its memory that the pools of all may take; reads the pool's
size, replies `ready`; then it does what rank 0 tells.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import BinaryIO

from quire_engine.contract.config import engine_config
from quire_engine.contract.errors import QuireError
from quire_engine.process.rank import begin_child
from quire_engine.ranks import LENGTH_BYTES


def main(rank: int, parent_pid: int) -> int:
    """Run until rank 0 ends; the process's exit code."""
    replies = begin_child(parent_pid)
    from quire_engine.build_rank import DeviceRank  # noqa: PLC0415 - before the first line is there

    told = sys.stdin.buffer
    line = told.readline()
    if not line:  # rank 0 has given up
        return 0
    try:
        first = json.loads(line)
        built = DeviceRank(engine_config(first["config"]), rank)
        print("resolved", file=replies)
        print(built.load(first["place"]), file=replies)
        line = told.readline()
        if not line:
            return 0
        follower = built.follower(**json.loads(line))
    except (QuireError, OSError, MemoryError, RuntimeError) as error:
        print(f"quire: rank {rank}: {error or type(error).__name__}", file=sys.stderr, flush=True)
        return 1
    gc.collect()
    gc.freeze()
    gc.enable()
    print("ready", file=replies)
    follower.follow(lambda: receive(told))
    return 0


def receive(told: BinaryIO) -> bytes:
    """The next message. EOFError where rank 0 has ended."""
    length = int.from_bytes(told.read(LENGTH_BYTES), "little")
    data = told.read(length)
    if not length or len(data) < length:
        raise EOFError("rank 0 has ended")
    return data


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))

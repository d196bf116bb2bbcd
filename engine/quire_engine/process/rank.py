"""A rank beside the engine process: `python -m quire_engine.process.rank RANK EXCHANGE_FD MEMORY_FD POOL_FD PARENT`.

Owns the process: its death with the parent, its replies. It reads the configuration and then the size of the pool, a
line of JSON each, says `ready` and computes what rank 0 tells until that ends. POOL_FD is -1 where rank 0 needs no
access to the pool; PARENT is the pid of the engine process.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
from typing import TextIO

from quire_engine.contract.config import engine_config
from quire_engine.contract.errors import QuireError
from quire_engine.machine import die_with_parent, leave_signals_to_parent


def main(rank: int, exchange_fd: int, memory_fd: int, pool_fd: int, parent_pid: int) -> int:
    """Run until rank 0 ends; the process's exit code."""
    replies = begin_child(parent_pid)
    from quire_engine.build_rank import build_rank  # noqa: PLC0415 - before the first line, while rank 0 reads weights

    told = iter(sys.stdin)
    line = next(told, None)
    if line is None:  # rank 0 has given up
        return 0
    try:
        built = build_rank(engine_config(json.loads(line)), rank, exchange_fd=exchange_fd)
        line = next(told, None)
        if line is None:
            return 0
        sizes = json.loads(line)
        own_pool = None if pool_fd < 0 else pool_fd
        follow = built.load(memory_fd, num_blocks=sizes["num_blocks"], positions=sizes["positions"], pool_fd=own_pool)
    except (QuireError, OSError, MemoryError) as error:
        print(f"quire: rank {rank}: {error or type(error).__name__}", file=sys.stderr, flush=True)
        return 1
    gc.collect()
    gc.freeze()
    gc.enable()
    print("ready", file=replies)
    follow()
    return 0


def begin_child(parent_pid: int) -> TextIO:
    """Make this process one that ends with its parent; where it replies to it, line by line."""
    leave_signals_to_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    die_with_parent(parent_pid)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    gc.disable()
    return replies


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:6])))

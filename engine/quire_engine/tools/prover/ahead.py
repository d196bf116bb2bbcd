"""A prover for an engine process whose start may have to check its GPU, forked while that is still possible.

Promises: where the GPU was checked before, no more than the fork was spent.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from quire_engine.contract.config import EngineConfig
from quire_engine.execution.proven_paths import may_be_asked
from quire_engine.execution.prover_process import ProverProcess
from quire_engine.machine import die_with_parent


@contextmanager
def prover_ahead(config: EngineConfig) -> Iterator[ProverProcess | None]:
    """Fork a prover, where one may be needed, and end it if it is not: for a process of one thread that has imported
    torch and has not touched the GPU. Importing torch again takes longer than the checks. None: a start that needs
    one launches it.
    """
    process = None
    if may_be_asked(config):
        with suppress(OSError):  # no memory or process is left for what may not be needed
            process = ProverProcess.forked(partial(_main, os.getpid()))
    try:
        yield process
    finally:
        if process is not None:
            process.dismiss()


def _main(parent: int) -> int:
    die_with_parent(parent)
    select.select([sys.stdin], [], [])  # a start that asks nothing imports no checks
    import quire_engine.tools.prover.__main__ as prover  # noqa: PLC0415

    return prover.main()

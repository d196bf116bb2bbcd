"""The engine child process: `python -m quire_engine.process FD PARENT_PID`.

Owns the process: its death with the parent, signals, the exit code. Promises: LOAD_PROGRESS frames, then READY or
START_FAILED.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from quire_engine.contract.errors import ConfigError, ModelLoadError, ProtocolError
from quire_engine.machine import die_with_parent, leave_signals_to_parent
from quire_engine.process.transport import Frame, FrameDecoder, LoadProgress, StartFailed, encode_frame

if TYPE_CHECKING:
    from quire_engine.build import BuiltEngine
    from quire_engine.process.loop import EngineLoop

_THREAD_FAILED = 70  # exit code


def _receive_start(connection: socket.socket, decoder: FrameDecoder) -> tuple[list[Frame], int | None, int | None]:
    """The first frames, and the descriptors that came with them: of memory files that outlive this process, empty or
    with the weights and the KV pool of the engine process before.
    """
    frames: list[Frame] = []
    descriptors: list[int] = []
    while not frames:
        try:
            data, brought, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        except ConnectionResetError:  # the parent has ended and left progress unread
            sys.exit(0)
        descriptors += brought
        if not data:
            sys.exit(0)
        frames = decoder.feed(data)
    weights, pool, *_ = *descriptors, None, None
    return frames, weights, pool


def main(fd: int, parent_pid: int) -> None:
    """Build the engine that the START frame asks for and run it until the socket closes."""
    leave_signals_to_parent()
    # SIGUSR1 from the supervisor's watchdog: print the stacks of a hung process before it is killed.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.excepthook = _end_with_thread
    die_with_parent(parent_pid)
    connection = socket.socket(fileno=fd)
    decoder = FrameDecoder()

    def tell(phase: str, done: int = 0, total: int = 0) -> None:
        connection.sendall(encode_frame(LoadProgress(phase=phase, done=done, total=total)))

    tell("loading libraries")

    # Loading makes no garbage, and garbage collections would take a tenth of its time.
    gc.disable()
    # Before START is read: importing torch takes most of a start, and a spare process has it done in advance.
    from quire_engine.build import build  # noqa: PLC0415
    from quire_engine.contract.config import EngineConfig  # noqa: PLC0415
    from quire_engine.engine import Engine  # noqa: PLC0415
    from quire_engine.process.loop import EngineLoop, Garbage  # noqa: PLC0415
    from quire_engine.process.pace import Pace  # noqa: PLC0415
    from quire_engine.tools.prover.ahead import prover_ahead  # noqa: PLC0415

    _freeze()
    (start, *early), memory_fd, pool_fd = _receive_start(connection, decoder)
    if not isinstance(start, EngineConfig):
        raise ProtocolError(f"the first frame is a {type(start).__name__}, not the engine's configuration")
    if start.faults:
        from quire_engine.process.faults import GarblingLoop, fail_start  # noqa: PLC0415

        fail_start(start.faults)
    try:
        with prover_ahead(start) as prover:
            built = build(start, memory_fd=memory_fd, pool_fd=pool_fd, prover=prover, tell=tell)
    except (ConfigError, ModelLoadError, OSError, MemoryError) as error:
        _fail_start(connection, error)
    engine = Engine(
        built.scheduler,
        built.executor,
        grammars=built.grammars,
        adapters=built.adapters,
        check_invariants=start.check_invariants,
    )
    _freeze()
    make: Callable[..., EngineLoop] = partial(GarblingLoop, faults=start.faults) if start.faults else EngineLoop
    pace = Pace() if start.learn else None
    loop = make(engine, connection, decoder, alive_seconds=start.alive_seconds, garbage=Garbage(), pace=pace)
    loop.send(built.plan)
    _run(loop, early, built)
    built.close()


def _end_with_thread(args: threading.ExceptHookArgs) -> None:
    """End the process where a thread of it has failed: without that thread requests would wait for ever, and the
    parent replaces a process that has ended.
    """
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    name = "a thread" if args.thread is None else args.thread.name
    print(f"{name} ended unexpectedly, and the engine process with it", file=sys.stderr)
    traceback.print_exception(args.exc_value)
    sys.stderr.flush()
    os._exit(_THREAD_FAILED)


def _freeze() -> None:
    """Let no collection scan what was imported and loaded, which stays alive. A spare process has done most of it."""
    gc.collect()
    gc.freeze()


def _run(loop: EngineLoop, early: list[Frame], built: BuiltEngine) -> None:
    """Run the loop to its end. Where a rank was killed from outside the parent sees such a kill of this process too:
    no request is to blame.
    """
    try:
        loop.run(early)
    except Exception:
        if built.lost_a_killed_rank:
            traceback.print_exc()
            os.kill(os.getpid(), signal.SIGKILL)
        raise


def _fail_start(connection: socket.socket, error: Exception) -> NoReturn:
    """Tell the parent why no engine can be built, and exit: with 2 for settings that cannot work, else 1."""
    if isinstance(error, ConfigError | ModelLoadError):
        message = str(error)
    else:  # a file that cannot be read, a disk or a memory without room
        message = f"the engine cannot be built: {error or type(error).__name__}"
    is_config = isinstance(error, ConfigError)
    connection.sendall(encode_frame(StartFailed(kind="config" if is_config else "model", message=message)))
    sys.exit(2 if is_config else 1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))

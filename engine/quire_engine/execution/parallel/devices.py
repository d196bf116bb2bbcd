"""The other ranks of an engine as child processes, one device each, which follow rank 0's runner.

Owns the children, the pipes of messages to them, and their meeting point. Promises: when a child ends before its last
message, so does this process, also while its device waits for the child's. Must not know: sequences.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
import torch.distributed as dist

from quire_engine.contract.config import DType, EngineConfig, KernelChoice
from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.gpu.rank_commands import DeviceLeader
from quire_engine.machine import CoreShare
from quire_engine.own_modules import module_command
from quire_engine.ranks import LENGTH_BYTES, Rank
from quire_kernels.divided import divided
from quire_kernels.kernel_set import KernelSet
from quire_kernels.ranks import DeviceCollective, RankLost, TorchDistributed

_GRACE_SECONDS = 2.0  # from the last message to a kill; and from a child's end to that of this process


def meet(place: Path, rank: Rank) -> DeviceCollective:
    """The exchange with the other ranks, which meet in this file. Raises ModelLoadError where NCCL cannot make it."""
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        dist.init_process_group(
            "nccl", init_method=f"file://{place}", rank=rank.number, world_size=rank.size, device_id=device
        )
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise ModelLoadError(f"rank {rank.number} of {rank.size} cannot reach the others by NCCL: {said}") from None
    assert dist.group.WORLD is not None
    return TorchDistributed(dist.group.WORLD, device)


class DeviceRanks:
    """Ranks 1, 2, ... of a model on devices 1, 2, ..., launched and met when the object is made."""

    def __init__(
        self, config: EngineConfig, kernels: KernelSet, dtype: torch.dtype, shares: Sequence[CoreShare]
    ) -> None:
        """`config`: of all ranks. `shares`: the cores of each, or none. Raises ModelLoadError, OSError."""
        size = config.tensor_parallel_size
        self._folder = TemporaryDirectory(prefix="quire-ranks-", ignore_cleanup_errors=True)
        place = Path(self._folder.name) / "meeting"
        own = replace(
            config,
            dtype=cast(DType, str(dtype).removeprefix("torch.")),
            kernels=cast(KernelChoice, kernels.name),
            packed_cache=False,
            faults=(),
            alive_seconds=0.0,
        )
        self._ended = threading.Event()
        self._children = Children([_command(rank) for rank in range(1, size)], shares[1:])
        self._children.watch(self._ended)
        self._children.tell_all({"config": asdict(own), "place": str(place)})
        self._children.replies()  # what they refuse is said before this process waits for them elsewhere
        self._collective = meet(place, Rank(0, size))
        self.kernels = divided(kernels, self._collective)
        self._leader: DeviceLeader | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of ranks 1, 2, ..."""
        return self._children.pids

    @property
    def one_was_killed(self) -> bool:
        """Whether a rank was ended by a SIGKILL: an operator's or the OOM killer's."""
        return self._children.one_was_killed

    def least(self, pool_bytes: int) -> int:
        """The bytes of the pools of all ranks, given what this rank's memory has room for. Raises ModelLoadError."""
        return min(pool_bytes, *map(int, self._children.replies()))

    def begin(self, *, num_blocks: int, max_model_len: int) -> DeviceLeader:
        """The leader of the others, once they have their pools. Raises ModelLoadError."""
        self._children.tell_all({"num_blocks": num_blocks, "max_model_len": max_model_len})
        self._children.replies()
        self._leader = DeviceLeader(self._collective, self._children.send)
        return self._leader

    def close(self) -> None:
        """End them."""
        self._ended.set()
        with suppress(RuntimeError):  # one is lost already
            if self._leader is not None:
                self._leader.end()
        self._children.end()
        self._folder.cleanup()


class Children:
    """Child processes that read lines of JSON, then messages, and that reply in lines."""

    def __init__(self, commands: Sequence[Sequence[str]], shares: Sequence[CoreShare]) -> None:
        """`shares`: the cores of each, or none. Raises OSError."""
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
            for command in commands
        ]
        for process, share in zip(self._processes, shares, strict=False):
            with suppress(OSError):  # a container forbids it: then the system chooses
                os.sched_setaffinity(process.pid, share.cpus)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def one_was_killed(self) -> bool:
        return any(process.poll() == -signal.SIGKILL for process in self._processes)

    def tell_all(self, value: object) -> None:
        """A line of JSON."""
        with suppress(RankLost):  # one has ended, which the wait for its reply tells
            self._write(json.dumps(value).encode() + b"\n")

    def send(self, message: bytes) -> None:
        """Raises RankLost."""
        self._write(len(message).to_bytes(LENGTH_BYTES, "little") + message)

    def replies(self) -> list[str]:
        """A line of each. Raises ModelLoadError where one has ended."""
        found = []
        for rank, process in enumerate(self._processes, start=1):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                count = 1 + len(self._processes)
                raise ModelLoadError(f"rank {rank} of {count} has ended at its start; see above")
            found.append(line.decode().strip())
        return found

    def watch(self, ended: threading.Event) -> None:
        """End this process when a child ends before `ended` is set: as the child was, if it was killed."""
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=_watch, args=(rank, process.pid, ended), name=f"rank {rank}", daemon=True).start()

    def end(self) -> None:
        for process in self._processes:
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _write(self, data: bytes) -> None:
        for rank, process in enumerate(self._processes, start=1):
            assert process.stdin is not None
            try:
                process.stdin.write(data)
                process.stdin.flush()
            except OSError as error:
                raise RankLost(f"rank {rank} of the model has ended") from error


def _command(rank: int) -> list[str]:
    return module_command("quire_engine.process.device_rank", str(rank), str(os.getpid()))


def _watch(rank: int, pid: int, ended: threading.Event) -> None:
    """End this process with a child: kernels of a device wait for a lost one without end, and so would this process."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # this process has noticed by itself
        return
    if found is None or ended.wait(_GRACE_SECONDS):
        return
    print(f"quire: rank {rank} of the model has ended, so the engine ends too", file=sys.stderr, flush=True)
    was_killed = found.si_code == os.CLD_KILLED and found.si_status == signal.SIGKILL
    if was_killed:  # the parent sees such a kill of this process too: no request is to blame
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)

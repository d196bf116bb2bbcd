"""The other ranks of an engine as its child processes.

Owns the children and the memory through which they exchange columns. Promises: the children end with this process;
a start that fails names the rank. Must not know: sequences.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import cast

import torch
from torch import Tensor

from quire_engine.contract.config import CpuVariant, DType, EngineConfig
from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.kv.pool_rows import mapped
from quire_engine.execution.models.served import ServedModel
from quire_engine.execution.parallel.model import Leader
from quire_engine.machine import CoreShare
from quire_engine.own_modules import module_command
from quire_engine.ranks import Rank
from quire_kernels.cpu.choice import load_chosen
from quire_kernels.cpu.ranks import SharedMemory, new_exchange
from quire_kernels.kernel_set import KernelSet
from quire_kernels.ranks import Collective

_GRACE_SECONDS = 2.0  # from the last message to a kill


class RankProcesses:
    """Ranks 1, 2, ... of a model, launched when the object is made; they load when `begin` tells them to."""

    def __init__(
        self,
        config: EngineConfig,
        kernels: KernelSet,
        dtype: torch.dtype,
        shares: Sequence[CoreShare],
        memory_fd: int,
        *,
        shares_pools: bool,
    ) -> None:
        """Joins `kernels` with the others' products. `config`: of all ranks. `shares`: the cores of each, or none.

        `memory_fd`: of the packed weights, which all ranks map. `shares_pools`: this process maps their pools, since
        blocks go elsewhere and come from there. Raises OSError.
        """
        size = config.tensor_parallel_size
        exchange = new_exchange(load_chosen(kernels.variant).library, size)
        self._collective = exchange_of(kernels, exchange, Rank(0, size))
        self._adapted = kernels.adapted
        own = replace(
            config,
            dtype=cast(DType, str(dtype).removeprefix("torch.")),
            cpu_variant=cast(CpuVariant, kernels.variant),  # what another process finds fastest may be another one
            packed_cache=False,
            speculation="off",
            kv_offload_dir="",
            kv_transfer=None,
            faults=(),
            alive_seconds=0.0,
        )
        self._pool_fds = [os.memfd_create("quire-kv", os.MFD_CLOEXEC) for _ in range(1, size)] if shares_pools else []
        self._pools: list[Tensor] = []
        self._children = [
            _launch(rank, exchange, memory_fd, self._pool_fds[rank - 1] if shares_pools else -1)
            for rank in range(1, size)
        ]
        os.close(exchange)
        for rank, child in enumerate(self._children, start=1):
            if shares:
                with suppress(OSError):  # a container forbids it: then the system chooses
                    os.sched_setaffinity(child.pid, shares[rank].cpus)
            _tell(child, asdict(own))
        self._leader: Leader | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of ranks 1, 2, ..."""
        return tuple(child.pid for child in self._children)

    @property
    def one_was_killed(self) -> bool:
        """Whether a rank was ended by a SIGKILL: an operator's or the OOM killer's."""
        return any(child.poll() == -signal.SIGKILL for child in self._children)

    @property
    def pools(self) -> tuple[Tensor, ...]:
        """The shared pools [blocks, bytes] uint8 of ranks 1, 2, ...; to be used while no step is computed."""
        return tuple(self._pools)

    def begin(
        self, decoder: ServedModel, *, num_blocks: int, block_bytes: int, positions: int, has_states: bool
    ) -> Leader:
        """The model as all ranks compute it, once they have mapped the weights and have their pools.

        `block_bytes`: of one rank's part of a block. `positions`: for which the model was loaded.
        `has_states`: it keeps a state of its own for each sequence. Raises
        ModelLoadError where one of them cannot, OSError.
        """
        for fd in self._pool_fds:
            os.ftruncate(fd, num_blocks * block_bytes)
            self._pools.append(mapped(fd, (num_blocks, block_bytes)))
            os.close(fd)
        for child in self._children:
            _tell(child, {"num_blocks": num_blocks, "positions": positions})
        for rank, child in enumerate(self._children, start=1):
            assert child.stdout is not None
            if child.stdout.readline().strip() != b"ready":
                raise ModelLoadError(f"rank {rank} of {1 + len(self._children)} has ended at its start; see above")
        self._leader = Leader(
            decoder, self._collective, self._adapted, shares_pools=bool(self._pools), has_states=has_states
        )
        return self._leader

    def close(self) -> None:
        """End them."""
        with suppress(RuntimeError):  # one is lost already
            if self._leader is not None:
                self._leader.end()
        for child in self._children:
            try:
                child.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def exchange_of(kernels: KernelSet, fd: int, rank: Rank) -> Collective:
    """The exchange with the other ranks through this file of memory, by which the kernels divide their products."""
    collective = SharedMemory(load_chosen(kernels.variant).library, fd, rank.number, rank.size)
    if kernels.join is None:
        raise ValueError(f"the {kernels.name} kernels are not divided among ranks")
    kernels.join(collective)
    return collective


def _launch(rank: int, exchange: int, memory_fd: int, pool_fd: int) -> subprocess.Popen[bytes]:
    command = module_command("quire_engine.process.rank", *map(str, (rank, exchange, memory_fd, pool_fd, os.getpid())))
    handed_on = [fd for fd in (exchange, memory_fd, pool_fd) if fd >= 0]
    return subprocess.Popen(command, pass_fds=handed_on, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)


def _tell(child: subprocess.Popen[bytes], value: object) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, which the wait for its reply tells
        child.stdin.write(json.dumps(value).encode() + b"\n")
        child.stdin.flush()

"""Builds the ranks beside the first one of a model: those that share its weights, and those with a device of their own.

Promises: what a rank computes follows from the same configuration as rank 0's. Must not know: requests, processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from quire_engine.build import Resolved, resolve
from quire_engine.contract.config import EngineConfig
from quire_engine.execution.executor import runner_limits, spare_blocks
from quire_engine.execution.gpu.device import CudaDevice
from quire_engine.execution.gpu.rank_commands import DeviceFollower
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.loading import Loading
from quire_engine.execution.models.served import ServedModel
from quire_engine.execution.parallel.devices import meet
from quire_engine.execution.parallel.model import follow
from quire_engine.execution.parallel.processes import exchange_of
from quire_engine.execution.progress import tell_nobody
from quire_kernels.divided import divided
from quire_kernels.ranks import Collective, DeviceCollective


@dataclass(frozen=True, slots=True)
class BuiltRank:
    """A rank beside the first one, before its weights are there."""

    resolved: Resolved
    collective: Collective

    def load(
        self, memory_fd: int, *, num_blocks: int, positions: int, pool_fd: int | None = None
    ) -> Callable[[], None]:
        """Map the weights that rank 0 has packed. The result computes what that one tells, until it ends.

        `pool_fd`: of the file of memory that is to be the pool, which rank 0 maps too.
        """
        resolved = self.resolved
        decoder = Loading(resolved.wanted(), memory_fd, tell_nobody).load(positions)
        size, layout = resolved.asked.limits.block_size, resolved.layout
        of = resolved.kernels, resolved.model, num_blocks, size, resolved.dtype, resolved.device
        kv = KVStorage(*of, layout=layout, memory_fd=pool_fd)
        shares_pools = pool_fd is not None
        return partial(follow, decoder, kv, self.collective, resolved.kernels.adapted, shares_pools=shares_pools)


def build_rank(config: EngineConfig, number: int, *, exchange_fd: int) -> BuiltRank:
    """A rank beside the first one, which divides all products with the others. Raises ConfigError, ModelLoadError."""
    resolved = resolve(config, rank=number)
    torch.set_num_threads(1)
    return BuiltRank(resolved, exchange_of(resolved.kernels, exchange_fd, resolved.rank))


class DeviceRank:
    """A rank beside the first one on a device of its own."""

    def __init__(self, config: EngineConfig, number: int) -> None:
        """Raises ConfigError, ModelLoadError."""
        torch.cuda.set_device(number)
        self._resolved: Resolved = resolve(config, rank=number)
        torch.set_num_threads(1)
        self._collective: DeviceCollective | None = None
        self._decoder: ServedModel | None = None

    def load(self, place: str) -> int:
        """Meet the other ranks, read the weights and run the largest steps, all ranks together.

        The bytes that the pools of all ranks may take, as this one's memory has it. Raises ConfigError, ModelLoadError.
        """
        self._collective = meet(Path(place), self._resolved.rank)
        kernels = divided(self._resolved.kernels, self._collective)
        self._resolved = resolved = replace(self._resolved, kernels=kernels)
        planned = resolved.pool(resolved.memory.before_load(resolved.bytes_beside_pool))
        self._decoder = Loading(resolved.wanted(), None, tell_nobody).load(resolved.memory.positions(planned))
        pool_bytes = resolved.memory.after_load(self._decoder)
        assert pool_bytes is not None
        return pool_bytes

    def follower(self, *, num_blocks: int, max_model_len: int) -> DeviceFollower:
        """The follower of rank 0's runner, with a pool for so many blocks that are scheduled."""
        resolved, device = self._resolved, self._resolved.device
        assert self._collective is not None
        assert self._decoder is not None
        kernels, limits = resolved.kernels, resolved.asked.limits
        blocks = num_blocks + spare_blocks(kernels, device)
        of = resolved.model, blocks, limits.block_size, resolved.dtype, device
        kv = KVStorage(kernels, *of, layout=resolved.layout)
        drafts = resolved.asked.speculation != "off"
        sizes = runner_limits(kernels, limits, max_model_len=max_model_len, num_blocks=num_blocks, drafts=drafts)
        return DeviceFollower(self._decoder, kv, CudaDevice(device), sizes, self._collective)

"""Replicas on one machine: N supervisors, among which its cores and its memory are divided.

A supervisor restarts its engine and finds culprits; packed weights are read once for each memory node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ModelLoadError
from quire_engine.contract.plan import EnginePlan, for_later_engines
from quire_engine.contract.types import EngineStats
from quire_engine.machine import CoreShare
from quire_server.engine.kv_events.events import CacheListener
from quire_server.engine.memory_files import WeightsMemory
from quire_server.engine.replica_routing import Router
from quire_server.engine.replicas import FAILOVER_SECONDS, ReplicaSet
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import Supervisor

ALIVE_SECONDS = 0.5  # between two signs of life of an engine

log = logging.getLogger("quire.replicas")


class LocalReplicas(ReplicaSet):
    """N supervisors as one engine."""

    def __init__(
        self,
        config: EngineConfig,
        policy: RestartPolicy,
        *,
        count: int,
        router: Router,
        failover_seconds: float = FAILOVER_SECONDS,
        shares: Sequence[CoreShare] = (),
        stderr: int | None = None,
        listeners: Sequence[CacheListener] = (),
        make: Callable[..., Supervisor] = Supervisor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config` is for all together: its threads and its memory are divided. `shares`: the cores of each; empty:
        not known. `listeners`: of each one's cache; empty: none. `make`: called as `Supervisor` is. The others: see
        `ReplicaSet`.
        """
        super().__init__(router=router, failover_seconds=failover_seconds, clock=clock)
        self._count = count
        self._config = divided_config(config, count)
        self._policy, self._make = policy, make
        self._listeners = list(listeners)
        self._shares, self._stderr = list(shares), stderr
        self._weights: dict[int, WeightsMemory] = {}  # by memory node, so that each reads its own
        self._first = self._add(self._config)

    @property
    def num_replicas(self) -> int:
        return self._count

    async def start(self) -> EnginePlan:
        """Start all engines; returns the first one's plan. Raises as `Supervisor.start` does for any of them.

        The others start when the first is ready: they take its pool size and instruction set, and its packed weights
        from memory.
        """
        plan = await self._first.start()
        later = for_later_engines(self._config, plan)
        others = [self._add(later) for _ in range(1, self._count)]
        starting = [asyncio.create_task(each.start()) for each in others]
        try:
            plans = await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        if any(other.identity.checkpoint != plan.identity.checkpoint for other in plans):
            raise ModelLoadError(f"{plan.model.path}: its files changed on disk while the replicas started")
        if any(other.identity.numerics != plan.identity.numerics for other in plans):
            log.warning("not all replicas compute the same bits: streams move among those that do")
        for name in self._replicas:
            self._sums.take(name, _empty(plan))
        return plan

    async def stop(self) -> None:
        await super().stop()
        for listener in self._listeners:  # also those of engines that never came to be
            listener.close()

    def _add(self, config: EngineConfig) -> Supervisor:
        number = len(self._replicas)
        share = self._shares[number] if self._shares else None
        weights = self._weights.setdefault(0 if share is None else share.node, WeightsMemory())
        supervisor = self._make(
            config,
            self._policy,
            stderr=self._stderr,
            cpus=() if share is None else share.cpus,
            weights=weights,
            quarantine=self.quarantine,
            listener=self._listeners[number] if self._listeners else None,
        )
        self._join(str(number), supervisor)
        return supervisor


def divided_config(config: EngineConfig, count: int) -> EngineConfig:
    """The configuration of each of `count` engines: threads and memory that are named are for all together."""
    return replace(
        config,
        replicas=count,
        tells_prefixes=True,
        alive_seconds=ALIVE_SECONDS,
        num_threads=None if config.num_threads is None else max(1, config.num_threads // count),
        kv_memory=None if config.kv_memory is None else config.kv_memory // count,
        kv_offload_size=config.kv_offload_size // count,
    )


def _empty(plan: EnginePlan) -> EngineStats:
    blocks = plan.scheduler.num_blocks
    return EngineStats(blocks_total=blocks, blocks_free=blocks, host_blocks_total=plan.scheduler.num_host_blocks)

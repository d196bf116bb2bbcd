"""Starts the engines of several models behind one port: their plans first, the engines when requests come.

Promises: every model's files and settings are looked at before the port serves; what cannot be served ends the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.plan import EnginePlan
from quire_engine.machine import available_memory
from quire_engine.memory_plan import bytes_text
from quire_engine.own_modules import module_command
from quire_server.engine.json_child import ask_each
from quire_server.engine.models.model_set import ModelEngine, ModelSet, Progress, Residency
from quire_server.engine.models.sleeping import SleepingSupervisor
from quire_server.engine.process import EngineProcess
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import Spare
from quire_server.settings import ModelEntry, ServerLimits, Settings

_FREE_SHARE = 0.5  # of the free memory, where no budget is set
_SPARE_SECONDS = 1.0  # after an engine is ready, since the next model may be asked for soon

log = logging.getLogger("quire")


class SeveralEngines:
    """The engines of all models while the server starts and stops; `models` has them once `start` has ended."""

    def __init__(self, entries: Sequence[ModelEntry], policy: RestartPolicy, *, stderr: int | None) -> None:
        self.entries = tuple(entries)
        self.models: ModelSet | None = None
        self.dead: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
        )  # never done: a model may come back
        self._policy = policy
        self._stderr = stderr
        # One process waits to be the next engine of any model.
        program = module_command("quire_engine.process")
        self._spare = Spare(lambda: EngineProcess(program, lambda _: None, stderr=stderr), _SPARE_SECONDS)

    @property
    def settings(self) -> Settings:
        """The default model's settings, which are the server's too."""
        return self.entries[0].settings

    @property
    def progress(self) -> Progress:
        """The progress of a load that is underway."""
        return None if self.models is None else self.models.progress

    async def plan(self) -> list[EnginePlan]:
        """The plan of each model, for which no weights are read. Raises ConfigError, ModelLoadError."""
        # Pools without a size of their own share what one alone would take.
        configs = [replace(entry.settings.engine_config(), replicas=len(self.entries)) for entry in self.entries]
        return await asyncio.to_thread(ask_each, "dry_run", configs, EnginePlan)

    async def start(self) -> ModelSet:
        """Make the engines, all of them asleep. Raises ConfigError, ModelLoadError."""
        plans = await self.plan()
        engines = []
        for entry, plan in zip(self.entries, plans, strict=True):
            supervisor = SleepingSupervisor(
                entry.settings.engine_config(), self._policy, stderr=self._stderr, spare=self._spare
            )
            residency = Residency(
                pinned=entry.pinned,
                priority=entry.priority,
                idle_seconds=entry.idle_seconds,
                sleep_level=entry.sleep_level,
            )
            engines.append(ModelEngine(entry.settings.model_names[0], supervisor, plan, residency))
        budget = self.settings.model_memory or int(available_memory() * _FREE_SHARE)
        check_budget(engines, budget)
        self.models = ModelSet(engines, budget=budget, turn_seconds=ServerLimits().model_turn)
        for engine in engines:
            log.info("the model %s takes %s when it is loaded", engine.name, bytes_text(_size(engine)))
        self._spare.prepare()
        log.info("all of them together may take %s", bytes_text(budget))
        return self.models

    async def stop(self) -> None:
        """End all engines. Idempotent."""
        if self.models is not None:
            await self.models.stop()
        await self._spare.close()


def check_budget(engines: Sequence[ModelEngine], budget: int) -> None:
    """Refuse a budget in which a model could never be loaded. Raises ConfigError."""
    pinned = sum(_size(engine) for engine in engines if engine.residency.pinned)
    others = [engine for engine in engines if not engine.residency.pinned]
    largest = max(others, key=_size, default=None)
    needed = pinned + (0 if largest is None else _size(largest))
    if needed > budget:
        beside = f" beside the pinned ones, which take {bytes_text(pinned)}" if pinned else ""
        what = "the pinned models" if largest is None else f"{largest.name}, {bytes_text(_size(largest))},{beside}"
        raise ConfigError(
            f"--model-memory {bytes_text(budget)} cannot hold {what.rstrip(',')}; set --model-memory to {needed} or"
            " more, or --kv-memory to less"
        )


def _size(engine: ModelEngine) -> int:
    return engine.weights_bytes + engine.engine_bytes

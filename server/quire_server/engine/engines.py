"""The interface of the engines to the rest of the server, be it one or several.

Two implementations: `supervisor.Supervisor` for one; `replicas.ReplicaSet` for several, on this machine or on others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import EnginePort
from quire_engine.process.transport import LoadProgress
from quire_server.engine.recovery import Quarantine


class Engines(EnginePort, Protocol):
    """Engines that are started, watched and restarted. A method's docstring is in either implementation."""

    on_restart: Callable[[], None]
    quarantine: Quarantine
    dead: asyncio.Future[None]  # done when no engine will come any more

    @property
    def num_replicas(self) -> int: ...
    def whole_plan(self, plan: EnginePlan) -> EnginePlan: ...
    @property
    def progress(self) -> LoadProgress | None: ...
    def load_ratio(self) -> float: ...
    def trouble(self) -> str | None: ...
    def overdue_seconds(self) -> float: ...
    async def start(self) -> EnginePlan: ...
    async def stop(self) -> None: ...
    async def inspect(self, what: str, argument: str = "{}") -> bytes: ...
    async def control(self, what: str, argument: str = "{}") -> bytes: ...

"""Metrics of the adapters that run and that are waited for, in the form that routers of several servers read."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire_engine.contract.config import EnginePlan
from quire_engine.contract.types import EngineStats
from quire_server.metrics.metric_values import Values


class AdapterMetrics:
    """One sample whose labels are lists of names and whose value is the time; none where adapters are not enabled."""

    def __init__(self, values: Values, clock: Callable[[], float] = time.time) -> None:
        self._max_lora = 0  # 0: adapters are not enabled
        self._clock = clock
        self._info = values.gauge(
            "quire_lora_requests_info",
            "The adapters of requests that run and of requests that wait, names with commas between them, and how many"
            " may run at once; the value is the time of this state, seconds since 1970.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
            alias="vllm:lora_requests_info",
        )

    def begin(self, plan: EnginePlan) -> None:
        """An engine with this plan has started."""
        self._max_lora = plan.scheduler.limits.max_loras if plan.adapters else 0

    def show(self, stats: EngineStats) -> None:
        """Take the place of the state before; called at each scrape."""
        self._info.values.clear()
        if self._max_lora:
            names = [",".join(sorted(names)) for names in (stats.waiting_adapters, stats.running_adapters)]
            self._info.set(self._clock(), str(self._max_lora), *names)

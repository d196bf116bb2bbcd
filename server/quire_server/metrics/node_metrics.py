"""The metrics of a node: its engine's load and pool under the names that a server's have, `vllm:` aliases included.

Promises: they are this engine's alone, and go on over its restarts. Must not know: requests, HTTP.
"""

from __future__ import annotations

import time

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from quire_engine.contract.plan import EnginePlan
from quire_server.metrics.metric_catalog import EngineMetrics, PlanMetrics
from quire_server.metrics.metric_values import Values
from quire_server.metrics.metrics import load_progress


class NodeMetrics:
    """Used on the event loop's thread."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        values = Values(self._registry, {"model_name": model_name})
        self._engine, self._plan, self._load_ratio = EngineMetrics(values), PlanMetrics(values), load_progress(values)
        self.observe = self._engine.observe  # the engine's state, once a step
        self.restarted = self._engine.restarted

    def begin(self, plan: EnginePlan) -> None:
        """The engine has started with this plan."""
        self._plan.observe(plan, None)
        self._engine.begin(plan)

    def render(self, load_ratio: float) -> bytes:
        """The exposition in the text format; `load_ratio`: the progress of the engine's start, 0 to 1."""
        self._load_ratio.set(load_ratio)
        self._engine.show(time.monotonic())
        return generate_latest(self._registry)

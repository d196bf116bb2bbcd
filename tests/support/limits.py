"""Configurations of the engine and of its scheduler from flat names, as an operator gives them.

Unless a test names other policies, groups enter by arrival and by their prompts alone, and the youngest is preempted: a
small pool is then short of blocks often, in an order that is easy to tell.
Promises: a name that is a limit goes into the limits, any other stays beside them.
Must not know: what the limits mean.
"""

from __future__ import annotations

from typing import Any

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import LIMIT_NAMES, SchedulerConfig, SchedulerLimits

PLAIN_POLICIES = {"scheduling_policy": "fcfs", "preemption_victim": "youngest", "admission": "prompt"}


def scheduler_config(**settings: Any) -> SchedulerConfig:
    """`settings` are fields of SchedulerConfig or of its limits."""
    return SchedulerConfig(**_nested(settings))


def engine_config(**settings: Any) -> EngineConfig:
    """`settings` are fields of EngineConfig or of its limits."""
    return EngineConfig(**_nested(settings))


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    limits = PLAIN_POLICIES | {name: settings.pop(name) for name in LIMIT_NAMES if name in settings}
    return {**settings, "limits": SchedulerLimits(**limits)}

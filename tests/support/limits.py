"""Configurations of the engine and of its scheduler from flat names, as an operator gives them.

Promises: a name that is a limit goes into the limits, any other stays beside them.
Must not know: what the limits mean.
"""

from __future__ import annotations

from typing import Any

from quire_engine.config import EngineConfig
from quire_engine.limits import LIMIT_NAMES, SchedulerConfig, SchedulerLimits


def scheduler_config(**settings: Any) -> SchedulerConfig:
    """`settings` are fields of SchedulerConfig or of its limits."""
    return SchedulerConfig(**_nested(settings))


def engine_config(**settings: Any) -> EngineConfig:
    """`settings` are fields of EngineConfig or of its limits."""
    return EngineConfig(**_nested(settings))


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    limits = {name: settings.pop(name) for name in LIMIT_NAMES if name in settings}
    return {**settings, "limits": SchedulerLimits(**limits)}

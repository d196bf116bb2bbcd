"""What the engine is to the server at a moment.

Promises: one word for each way in which requests are met. Must not know: processes, what changes it.
"""

from __future__ import annotations

from enum import Enum


class EngineState(Enum):
    """The life of the engine as the server sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    DEAD = "dead"  # given up; the server exits with 70

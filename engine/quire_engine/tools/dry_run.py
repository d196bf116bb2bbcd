"""Resolves configurations to plans without loading weights: `python -m quire_engine.tools.dry_run`, in JSON.

Promises: no weight is read; a question is an `EngineConfig`, the reply its `EnginePlan`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from quire_engine.build import resolve_plan
from quire_engine.contract.config import engine_config
from quire_engine.tools.json_child import converse


def answers(questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A plan for each configuration. Raises ConfigError, ModelLoadError."""
    for asked in questions:
        yield asdict(resolve_plan(engine_config(asked)))


if __name__ == "__main__":
    sys.exit(converse(answers))

"""Reads adapters without an engine: `python -m quire_engine.tools.adapter_facts`, in JSON.

Promises: no weight of the model is read; a question has an `EngineConfig` as `config` and a directory as
`path`, the reply is `AdapterFacts`, as an engine with this configuration finds them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from quire_engine.contract.config import engine_config
from quire_engine.contract.errors import ModelLoadError
from quire_engine.contract.types import AdapterFacts
from quire_engine.execution.load_thread import LoadThread
from quire_engine.execution.models.adapter import ReadAdapter, read_adapter
from quire_engine.execution.models.config import ModelConfig, load_model_config
from quire_engine.gguf import typed_name
from quire_engine.tools.json_child import converse


def answers(questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The facts of each adapter. Raises ConfigError, ModelLoadError."""
    for asked in questions:
        config = engine_config(asked["config"])
        if not config.enable_lora:
            raise ModelLoadError(f"{typed_name(config.model)}: adapters are not enabled")
        model = _model(config.model, config.ignore_config_keys)
        read = _read(str(asked["path"]), model, config.max_lora_rank)
        yield asdict(AdapterFacts(digest=read.digest, rank=read.rank))


def _read(path: str, model: ModelConfig, max_rank: int) -> ReadAdapter:
    loads = LoadThread(lambda path: read_adapter(Path(path), model, max_rank=max_rank), "adapter")
    return loads.submit(path).result()


@cache
def _model(path: str, ignored: tuple[str, ...]) -> ModelConfig:
    return load_model_config(Path(path), ignored)


if __name__ == "__main__":
    sys.exit(converse(answers))

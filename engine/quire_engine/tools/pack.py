"""Packs a model's weights into a file: `python -m quire_engine.tools.pack`, with questions and replies in JSON.

Promises: a question is an `EngineConfig`; replies report progress, and the last one names the file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from quire_engine.build import resolve
from quire_engine.contract.config import EngineConfig, engine_config
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.execution.loading import Loading
from quire_engine.execution.progress import Tell
from quire_engine.gguf import typed_name
from quire_engine.tools.json_child import converse


def pack(config: EngineConfig, tell: Tell) -> str:
    """Write the packed weights to a file, unless it exists; return its path.

    Raises ConfigError, ModelLoadError.
    """
    resolved = resolve(config, tell=tell)
    if resolved.kernels.packed_form is None:
        raise ConfigError(f"the {resolved.kernels.name} kernels take weights as they are: nothing is to be packed")
    if not config.packed_cache:
        raise ConfigError("packed_cache keeps no packed weights; leave it out")
    torch.set_num_threads(1)
    resolved.memory.before_load(resolved.weights.total)
    loading = Loading(resolved.wanted(), None, tell)
    loading.load(1, keep_any=True)
    file = loading.file()
    if file is None:
        raise ModelLoadError(f"the packed weights of {typed_name(config.model)} are in no file; a line above says why")
    return str(file)


def answers(questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each configuration progress reports, then the file. Raises ConfigError, ModelLoadError."""
    for asked in questions:
        replies: SimpleQueue[dict[str, Any] | Exception] = SimpleQueue()
        # Packing runs in a thread, so that progress is reported meanwhile.
        Thread(target=_work, args=(engine_config(asked), replies), name="pack", daemon=True).start()
        while True:
            reply = replies.get()
            if isinstance(reply, Exception):
                raise reply
            yield reply
            if "file" in reply:
                break


def _work(config: EngineConfig, replies: SimpleQueue[dict[str, Any] | Exception]) -> None:
    def tell(phase: str, done: int, total: int) -> None:
        replies.put({"phase": phase, "done": done, "total": total})

    try:
        replies.put({"file": pack(config, tell)})
    except Exception as error:
        replies.put(error)


if __name__ == "__main__":
    sys.exit(converse(answers))

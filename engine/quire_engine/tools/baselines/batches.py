"""The conversation of a baseline with the benchmark: one JSON object per line, batches in, times out.

Promises: the first line in is the configuration, the first line out says that the model is loaded; then a line out for
each line in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire_engine.config import EngineConfig, engine_config
from quire_engine.tools.json_child import converse


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One request of a batch. Greedy, ended by its length only."""

    prompt: Sequence[int]
    output_tokens: int


# For each member, when its tokens were there: seconds after the batch began.
Times = list[list[float]]
RunBatch = Callable[[Sequence[Member]], Times]


def answer(load: Callable[[EngineConfig], RunBatch]) -> int:
    """Serve stdin until it ends; the process's exit code."""
    return converse(partial(_answers, load))


def _answers(load: Callable[[EngineConfig], RunBatch], lines: Iterator[Any]) -> Iterator[dict[str, Any]]:
    run = load(engine_config(next(lines)))
    yield {"ready": True}
    for batch in lines:
        yield {"times": run([Member(prompt=prompt, output_tokens=count) for prompt, count in batch])}

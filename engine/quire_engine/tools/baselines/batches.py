"""The protocol between a baseline and the benchmark: lines of JSON, batches in, token times out.

Promises: the first input line is the configuration, the first output line reports that the model is loaded; each later
input line gets one output line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire_engine.contract.config import EngineConfig, engine_config
from quire_engine.tools.json_child import converse


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One request of a batch: greedy, with a fixed number of output tokens."""

    prompt: Sequence[int]
    output_tokens: int


# Arrival times of each member's tokens, in seconds after the start of the batch.
Times = list[list[float]]
RunBatch = Callable[[Sequence[Member]], Times]


def answer(load: Callable[[EngineConfig], RunBatch]) -> int:
    """Answer questions on stdin until it ends; return the process's exit code."""
    return converse(partial(_answers, load))


def _answers(load: Callable[[EngineConfig], RunBatch], lines: Iterator[Any]) -> Iterator[dict[str, Any]]:
    run = load(engine_config(next(lines)))
    yield {"ready": True}
    for batch in lines:
        yield {"times": run([Member(prompt=prompt, output_tokens=count) for prompt, count in batch])}

"""The conversation of a baseline with the benchmark: one JSON object per line, batches in, times out.

Promises: the first line in is the configuration, the first line out says that the model is loaded; then a line out for
each line in. Nothing else is written to stdout. Must not know: how a batch is computed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from quire_engine.config import EngineConfig
from quire_engine.errors import QuireError


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
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between the replies
    try:
        run = load(EngineConfig(**json.loads(sys.stdin.readline())))
    except (QuireError, ImportError) as error:
        _write(replies, {"error": str(error)})
        return 1
    _write(replies, {"ready": True})
    for line in sys.stdin:
        members = [Member(prompt=prompt, output_tokens=count) for prompt, count in json.loads(line)]
        _write(replies, {"times": run(members)})
    return 0


def _write(replies: TextIO, value: object) -> None:
    replies.write(json.dumps(value) + "\n")

"""Questions about the engine's state and orders to it as frames: JSON in, JSON out.

Promises: an answer is bounded; what cannot be answered is an error in words, never an exception of the loop.
Must not know: what can be asked, who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire_engine.engine import Engine
from quire_engine.errors import Unanswerable
from quire_engine.process.transport import Control, Inspect, Inspected

MAX_BODY_BYTES = 8 << 20  # every stream waits while it is made and sent


def inspected(engine: Engine, question: Inspect) -> Inspected:
    """The answer to one question."""
    return _answered(engine.inspect, question)


def controlled(engine: Engine, order: Control) -> Inspected:
    """What was done for one order."""
    return _answered(engine.control, order)


def _answered(answer: Callable[[str, Mapping[str, Any]], object], asked: Inspect | Control) -> Inspected:
    try:
        arguments = msgspec.json.decode(asked.argument, type=dict[str, Any])
        body = msgspec.json.encode(answer(asked.what, arguments))
    except Unanswerable as error:
        return Inspected(token=asked.token, error=str(error))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        return Inspected(token=asked.token, error=f"the question {asked.what!r} cannot be read: {error}")
    if len(body) > MAX_BODY_BYTES:
        return Inspected(token=asked.token, error=f"the answer has {len(body)} bytes; ask for less at a time")
    return Inspected(token=asked.token, body=body)

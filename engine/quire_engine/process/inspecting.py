"""Questions about the engine's state as frames: JSON in, JSON out.

Promises: an answer is bounded; what cannot be answered is an error in words, never an exception of the loop.
Must not know: what can be asked, who asks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire_engine.engine import Engine
from quire_engine.errors import Unanswerable
from quire_engine.process.transport import Inspect, Inspected

MAX_BODY_BYTES = 8 << 20  # every stream waits while it is made and sent


def inspected(engine: Engine, question: Inspect) -> Inspected:
    """The answer to one question."""
    try:
        arguments = msgspec.json.decode(question.argument, type=dict[str, Any])
        body = msgspec.json.encode(engine.inspect(question.what, arguments))
    except Unanswerable as error:
        return Inspected(token=question.token, error=str(error))
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        return Inspected(token=question.token, error=f"the question {question.what!r} cannot be read: {error}")
    if len(body) > MAX_BODY_BYTES:
        return Inspected(token=question.token, error=f"the answer has {len(body)} bytes; ask for less at a time")
    return Inspected(token=question.token, body=body)

"""What a client is told whose request has ended with an error, by what the engine or the server says of it.

Promises: one kind of end is one error, in whole replies, streams and vectors. Must not know: dialects, HTTP.
"""

from __future__ import annotations

from quire_engine.types import OF_THE_REQUEST, TokenOutput
from quire_server.errors import (
    AbortedByOperator,
    ApiError,
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    ShuttingDown,
)


def error_of(output: TokenOutput) -> ApiError:
    """The error of an output whose `finish` is "error"."""
    match output.error_code:
        case DeadlineExceeded.default_code:
            return DeadlineExceeded()
        case AbortedByOperator.default_code:
            return AbortedByOperator()
        case ShuttingDown.default_code:
            return ShuttingDown()
    error = output.error or "The engine failed."
    if error.startswith(OF_THE_REQUEST):
        return BadRequest(f"With what this request asks for, {error}.")
    return EngineFailed(error, culprit=output.culprit)

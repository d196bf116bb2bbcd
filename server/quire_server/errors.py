"""Every error a client can get: its HTTP status, its envelope and its headers, in one tree.

Promises: statuses live only here; bodies are the OpenAI envelope, at most 1 KB of message, never an object's repr. Must
not know: frameworks, the engine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from typing_extensions import TypedDict  # pydantic documents only this one before Python 3.12

MESSAGE_BYTES = 1024
_LONGEST_QUEUE_WAIT = 120.0  # seconds; SDKs do not retry at all above this
_LONGEST_UNREADINESS = 30.0  # seconds; a restart takes less, and a drained server is replaced
_MOST_NAMES = 6  # of served models, in a message
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}")


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class ApiError(Exception):
    """Base of all error replies. `message` is one text for the client, never a long echo of its input."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.headers: dict[str, str] = dict(headers or {})


class ClientError(ApiError):
    """Base of those that the request itself, or its client, has led to."""

    type = "invalid_request_error"


class BadRequest(ClientError):
    """400: a value, type, range or combination that cannot be served; `param` names the field."""

    status = 400
    default_code = "invalid_value"


class Unsupported(BadRequest):
    """400: a feature that this server or this route does not support."""

    default_code = "unsupported_parameter"


class RequestQuarantined(BadRequest):
    """400: similar requests crashed the engine or made a step fail; they are refused for a while."""

    default_code = "request_quarantined"

    def __init__(self, seconds: float) -> None:
        message = f"This request made the engine fail before; it is not tried again for {math.ceil(seconds)} s."
        super().__init__(message, headers={"x-should-retry": "false"})


class ContextLengthExceeded(BadRequest):
    """400: the prompt (or prompt and max_tokens) exceeds the context; the message has both numbers."""

    default_code = "context_length_exceeded"


class Unauthorized(ClientError):
    """401: no key, or a wrong one; the message is the same for every cause."""

    status = 401
    default_code = "invalid_api_key"

    def __init__(self) -> None:
        message = "Missing or invalid API key: send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'."
        super().__init__(message, headers={"WWW-Authenticate": 'Bearer realm="quire"'})


class Forbidden(ClientError):
    """403: for the operator only; the server has no key that would allow it."""

    status = 403
    default_code = "admin_only"


class OriginNotAllowed(Forbidden):
    """403: a page of another site sent a request that changes something; --allowed-origins adds sites."""

    default_code = "origin_not_allowed"


class HostNotAllowed(Forbidden):
    """403: the Host header names another server; --allowed-hosts adds names."""

    default_code = "host_not_allowed"


class RouteNotFound(ClientError):
    """404: no such path."""

    status = 404
    default_code = "not_found"


class ModelNotFound(ClientError):
    """404: the model's name is unknown; the message lists the served ones."""

    status = 404
    default_code = "model_not_found"

    def __init__(self, model: str, served: Sequence[str] = ()) -> None:
        shown = ", ".join(f"'{name[:96]}'" for name in served[:_MOST_NAMES])
        more = f" and {len(served) - _MOST_NAMES} more, see /v1/models" if len(served) > _MOST_NAMES else ""
        known = f" This server has {shown}{more}." if served else ""
        super().__init__(f"The model '{model[:96]}' does not exist.{known}", param="model")


class ResponseNotFound(ClientError):
    """404: this key has no stored response or item of that id."""

    status = 404
    default_code = "response_not_found"


class BatchesOff(ClientError):
    """404: this server was started without --batch-dir, the folder of files and batches."""

    status = 404
    default_code = "batches_off"

    def __init__(self) -> None:
        super().__init__("This server keeps no files and batches: start it with --batch-dir FOLDER.")


class FileNotFound(ClientError):
    """404: this key has no file of that id."""

    status = 404
    default_code = "file_not_found"

    def __init__(self, file_id: str, *, param: str | None = None) -> None:
        super().__init__(f"There is no file with the id '{file_id[:96]}'.", param=param)


class BatchNotFound(ClientError):
    """404: this key has no batch of that id."""

    status = 404
    default_code = "batch_not_found"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"There is no batch with the id '{batch_id[:96]}'.")


class NotRemembered(ClientError):
    """404: the request or step is unknown, or no longer recorded."""

    status = 404
    default_code = "not_remembered"


class MethodNotAllowed(ClientError):
    """405: the path exists, the method does not."""

    status = 405
    default_code = "method_not_allowed"


class RequestTimeout(ClientError):
    """408: the client was too slow to send its request; the connection is closed."""

    status = 408
    default_code = "request_timeout"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Connection": "close"})


class Conflict(ClientError):
    """409: not possible in the current state."""

    status = 409
    default_code = "conflict"


class PayloadTooLarge(ClientError):
    """413: more body bytes than the limit; the connection is closed."""

    status = 413
    default_code = "payload_too_large"

    def __init__(self, limit_bytes: int, *, max_model_len: int | None = None) -> None:
        message, code = f"The request body is larger than {limit_bytes} bytes.", None
        if max_model_len is not None:  # clients that know this code shorten their prompts
            message = (
                f"The request body is larger than {limit_bytes} bytes, more than prompts take for which the maximum"
                f" context length of {max_model_len} tokens has room."
            )
            code = ContextLengthExceeded.default_code
        super().__init__(message, code=code, headers={"Connection": "close"})


class UnsupportedMediaType(ClientError):
    """415: the body is not JSON, or has an unsupported compression."""

    status = 415
    default_code = "unsupported_media_type"


class QueueFull(ApiError):
    """429: the bounded queue is full; the reply says when to retry."""

    status = 429
    type = "rate_limit_error"
    default_code = "queue_full"

    def __init__(
        self,
        message: str = "The server's queue is full; retry later.",
        *,
        retry_after_seconds: float,
        code: str | None = None,
    ) -> None:
        super().__init__(message, code=code, headers=_retry_headers(retry_after_seconds, _LONGEST_QUEUE_WAIT))


class BudgetSpent(QueueFull):
    """429: the tenant's tokens of the day or the month are used up; the message says when it gets new ones."""

    default_code = "tenant_day_budget"

    def __init__(self, message: str, *, retry_after_seconds: float, code: str, come_again: bool) -> None:
        super().__init__(message, retry_after_seconds=retry_after_seconds, code=code)
        if not come_again:  # SDKs that retry would be refused again
            self.headers["x-should-retry"] = "false"


class HeadersTooLarge(ClientError):
    """431: too many header fields or too many header bytes; the connection is closed."""

    status = 431
    default_code = "headers_too_large"

    def __init__(self, message: str) -> None:
        super().__init__(message, headers={"Connection": "close"})


class ClientGone(ClientError):
    """499, seen in logs and metrics only: the client disconnected before its reply."""

    status = 499
    default_code = "client_gone"

    def __init__(self) -> None:
        super().__init__("The client closed the connection.")


class EngineFailed(ApiError):
    """500: the engine failed while running this request; `culprit` means that retrying would fail again."""

    status = 500
    default_code = "engine_error"

    def __init__(self, message: str, *, code: str | None = None, culprit: bool = False) -> None:
        super().__init__(message, code=code, headers={"x-should-retry": "false"} if culprit else None)


class NotReady(ApiError):
    """503: draining or restarting; an integer Retry-After of 1 to 30 seconds."""

    status = 503
    default_code = "not_ready"

    def __init__(
        self,
        message: str = "The server is not ready; retry later.",
        *,
        retry_after_seconds: float = 5.0,
        code: str | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message, code=code, headers=_retry_headers(retry_after_seconds, _LONGEST_UNREADINESS))
        if close:
            self.headers["Connection"] = "close"


class ShuttingDown(NotReady):
    """503: the server is stopping, or stopped before this request was finished; retry on another server."""

    default_code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is shutting down.", close=True)


class ReplicaLost(NotReady):
    """503: the request's replica was lost and no other one could take over in time; it may be retried."""

    default_code = "replica_lost"

    def __init__(self) -> None:
        super().__init__("The replica with this request was lost, and no other one could go on with it in time.")


class AbortedByOperator(ApiError):
    """503: the operator aborted the request; do not retry it."""

    status = 503
    default_code = "aborted"

    def __init__(self) -> None:
        super().__init__("The operator has ended this request.", headers={"x-should-retry": "false"})


class RequestCancelled(ClientError):
    """499: the client cancelled the request by another request."""

    status = 499
    default_code = "request_cancelled"

    def __init__(self) -> None:
        super().__init__("The request was cancelled by its client.", headers={"x-should-retry": "false"})


class DeadlineExceeded(ApiError):
    """504: the request did not finish within its timeout."""

    status = 504
    default_code = "deadline_exceeded"

    def __init__(self) -> None:
        super().__init__(
            "The request was not finished by its deadline ('timeout' or X-Request-Timeout).",
            headers={"x-should-retry": "false"},  # no time is left for a retry
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFacts:
    """An error as another process of the server can make it again."""

    kind: str  # the name of its class
    message: str
    param: str | None
    code: str
    headers: dict[str, str]


def facts_of(error: ApiError) -> ErrorFacts:
    return ErrorFacts(
        kind=type(error).__name__, message=error.message, param=error.param, code=error.code, headers=error.headers
    )


def error_from(facts: ErrorFacts) -> ApiError:
    """The error of these facts. Raises KeyError for a class that is none of this module's."""
    kind = _kinds()[facts.kind]
    error = kind.__new__(kind)  # each class makes its message from arguments of its own
    ApiError.__init__(error, facts.message, param=facts.param, code=facts.code, headers=facts.headers)
    return error


@cache
def _kinds() -> dict[str, type[ApiError]]:
    kinds, new = {ApiError.__name__: ApiError}, [ApiError]
    while new:
        for kind in new.pop().__subclasses__():
            kinds[kind.__name__] = kind
            new.append(kind)
    return kinds


def error_body(err: ApiError) -> ErrorBody:
    """The OpenAI envelope; the message cut to 1 KB of UTF-8, without memory addresses and control characters."""
    return {
        "error": {
            "message": _safe_text(err.message),
            "type": err.type,
            "param": None if err.param is None else _safe_text(err.param[:256]),
            "code": err.code,
        }
    }


def internal_error() -> ApiError:
    """The error for an unexpected exception: a fixed text, so that nothing leaks."""
    return ApiError("The server had an internal error; see its log under the request id.")


def _safe_text(text: str) -> str:
    printable = "".join(c if c.isprintable() or c == "\n" else " " for c in text[:MESSAGE_BYTES])
    raw = _ADDRESS.sub("0x…", printable).encode("utf-8", "replace")
    if len(raw) <= MESSAGE_BYTES:
        return raw.decode("utf-8")
    return raw[: MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "…"


def _retry_headers(seconds: float, longest: float) -> dict[str, str]:
    bounded = min(max(seconds, 0.001), longest) if math.isfinite(seconds) else longest
    return {"Retry-After": str(math.ceil(bounded)), "retry-after-ms": str(math.ceil(bounded * 1000))}

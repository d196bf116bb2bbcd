"""The envelope of an error: OpenAI's, or Anthropic's and Ollama's on the paths of their APIs.

Promises: status and headers are the same in all; the path alone decides, so that errors made before routing have the
right envelope too.
"""

from __future__ import annotations

from typing import Literal

from starlette.responses import JSONResponse, Response
from starlette.types import Scope
from typing_extensions import TypedDict  # pydantic documents only this one before Python 3.12

from quire_server.errors import ApiError, ContextLengthExceeded, error_body

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api"

Dialect = Literal["openai", "anthropic", "ollama"]

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    503: "overloaded_error",  # Anthropic's servers send 529, which other proxies and clients do not know
}
_TOO_LONG = "prompt is too long: "  # agents look for these words and then shorten their history


class AnthropicErrorCause(TypedDict):
    error_code: str


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str
    details: AnthropicErrorCause  # the `code` of OpenAI's envelope, where Anthropic's SDKs look for it


class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class OllamaErrorBody(TypedDict):
    error: str
    code: str | None  # the `code` of OpenAI's envelope


def dialect_of(path: str) -> Dialect:
    """The API that a path, without the root path of a proxy, belongs to."""
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return "anthropic"
    return "ollama" if path.startswith(f"{OLLAMA_PATH}/") else "openai"


def dialect_of_scope(scope: Scope) -> Dialect:
    return dialect_of(scope["path"].removeprefix(scope.get("root_path", "")))


def ollama_body(error: ApiError) -> OllamaErrorBody:
    """The error's text as in OpenAI's envelope, where Ollama's clients look for it."""
    detail = error_body(error)["error"]
    return {"error": detail["message"], "code": detail["code"]}


def anthropic_body(error: ApiError, request_id: str) -> AnthropicErrorBody:
    """The error's text as in OpenAI's envelope, with Anthropic's type for the status."""
    message = error_body(error)["error"]["message"]
    if error.code == ContextLengthExceeded.default_code:
        message = _TOO_LONG + message
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    detail: AnthropicErrorDetail = {"type": kind, "message": message, "details": {"error_code": error.code}}
    return {"type": "error", "error": detail, "request_id": request_id}


def error_reply(error: ApiError, scope: Scope) -> Response:
    """The error as a whole reply to the request of this scope."""
    match dialect_of_scope(scope):
        case "anthropic":
            return JSONResponse(anthropic_body(error, scope["state"]["request_id"]), error.status, error.headers)
        case "ollama":
            return JSONResponse(ollama_body(error), error.status, error.headers)
    return JSONResponse(error_body(error), error.status, error.headers)

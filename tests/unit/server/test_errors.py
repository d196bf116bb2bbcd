"""The error tree: envelope, bounds, headers."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from quire_server import errors
from quire_server.errors import (
    ApiError,
    BadRequest,
    ClientError,
    ContextLengthExceeded,
    EngineFailed,
    ModelNotFound,
    NotReady,
    QueueFull,
    Unauthorized,
    error_body,
    internal_error,
)


def test_envelope_has_the_four_fields() -> None:
    body = error_body(BadRequest("n is too large", param="n", code="too_large"))
    assert body == {
        "error": {"message": "n is too large", "type": "invalid_request_error", "param": "n", "code": "too_large"}
    }


def test_no_error_is_promised_that_nothing_raises() -> None:
    own = Path(errors.__file__)
    made = set()
    for path in own.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path != own else ():
            match node:
                case ast.Call(func=ast.Name(id=name)) | ast.Raise(exc=ast.Name(id=name)):
                    made.add(name)
                case ast.comprehension(iter=ast.Tuple(elts=kinds)):  # a table of errors by their codes
                    made |= {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, ApiError) and kind not in (ApiError, ClientError):
            assert name in made


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadRequest("x"), 400, "invalid_value"),
        (ContextLengthExceeded("x"), 400, "context_length_exceeded"),
        (Unauthorized(), 401, "invalid_api_key"),
        (ModelNotFound("gpt-5"), 404, "model_not_found"),
        (QueueFull(retry_after_seconds=1), 429, "queue_full"),
        (EngineFailed("x"), 500, "engine_error"),
        (NotReady(), 503, "not_ready"),
    ],
)
def test_status_and_code(error: ApiError, status: int, code: str) -> None:
    assert (error.status, error_body(error)["error"]["code"]) == (status, code)


@pytest.mark.parametrize("filler", ["x", "é", "日", "😀"])
def test_messages_are_cut_to_a_kilobyte(filler: str) -> None:
    message = error_body(BadRequest(filler * 5000))["error"]["message"]
    assert 1000 <= len(message.encode()) <= 1024
    assert set(message) <= {filler, "…"}


def test_messages_lose_addresses_surrogates_and_control_characters() -> None:
    message = error_body(BadRequest("<object at 0x7f2540803e10>\x1b[31m\ud800\r\x00"))["error"]["message"]
    assert "7f2540803e10" not in message
    assert message.encode("utf-8").decode("utf-8") == message
    assert not set(message) & {"\x1b", "\r", "\x00", "\ud800"}


@pytest.mark.parametrize(
    ("seconds", "whole", "milliseconds"),
    [(0.0, "1", "1"), (0.2, "1", "200"), (1.0, "1", "1000"), (1.01, "2", "1010"), (1e9, "120", "120000")],
)
def test_queue_full_says_when_to_return(seconds: float, whole: str, milliseconds: str) -> None:
    headers = QueueFull(retry_after_seconds=seconds).headers
    assert headers == {"Retry-After": whole, "retry-after-ms": milliseconds}


@pytest.mark.parametrize(("seconds", "whole"), [(-5.0, "1"), (0.0, "1"), (7.2, "8"), (float("inf"), "30")])
def test_not_ready_says_1_to_30_seconds(seconds: float, whole: str) -> None:
    assert NotReady(retry_after_seconds=seconds).headers["Retry-After"] == whole


def test_draining_closes_the_connection() -> None:
    assert NotReady(close=True).headers["Connection"] == "close"
    assert "Connection" not in NotReady().headers


def test_a_proven_culprit_is_not_retried() -> None:
    assert EngineFailed("x", culprit=True).headers == {"x-should-retry": "false"}
    assert EngineFailed("x").headers == {}


def test_model_names_are_echoed_within_bounds() -> None:
    assert len(error_body(ModelNotFound("m" * 10_000))["error"]["message"]) < 200


def test_an_unexpected_exception_has_a_fixed_text() -> None:
    try:
        raise ValueError("secret at /home/user/model 0x7f2540803e10")
    except ValueError:
        error = internal_error()
    assert error.status == 500
    assert "secret" not in str(error_body(error))

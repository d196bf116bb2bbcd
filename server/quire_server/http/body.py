"""Strict JSON bodies: bytes to a validated pydantic model, for every POST route.

Promises: what a client got wrong is a BadRequest that names the field and never echoes the input at length; a body that
is not small is parsed and validated off the event loop.

Use in a route:

    Body = Annotated[CompletionRequest, json_body(CompletionRequest)]

    @router.post("/v1/completions")
    async def create_completion(body: Body, request: Request) -> Response: ...

`json_body(Model)` is a FastAPI dependency: it checks the content type, parses with `parse_json`, validates strictly
with `validate`, and marks the route, so that /openapi.json documents the model as its request body. A model's
validators may raise ValueError (its text becomes the message) or any ApiError (passed through as it is). Lists stay
lists in strict mode: declare `list`, not `tuple`. Declare a list whose length the model does not bound as
`LongList[X]`: two million wrong items would otherwise become two million error records, and two million right ones
would hold the interpreter in one go.
"""

from __future__ import annotations

import re
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar, cast

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import Request, params
from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, core_schema

from quire_server.errors import BadRequest, ClientGone, UnsupportedMediaType
from quire_server.http.body_limits import BodyBuffer, BodyLimits, Bytes, declared_bytes, hold_of
from quire_server.http.content_coding import coding_of
from quire_server.http.disconnect import unless_client_gone
from quire_server.http.json_text import JsonLimits, invalid_json, parse_pieces, parse_text, short

MAX_REPORTED_ERRORS = 10
INLINE_BYTES = 16 << 10  # a smaller body is parsed in less time than a thread needs to start
_MEDIUM_BYTES = 256 << 10  # smaller bodies do not wait behind larger ones
_LIST_PIECE = 16_384  # items that are validated at once
_ANY = JsonLimits(max_values=1 << 24)

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")
JsonObject = dict[str, object]


class _InPieces:
    """Validates a list some thousand items at a time, up to the first wrong one, so that other threads can run.

    (pydantic's own marker for the first wrong item does not work inside a union.)
    """

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        whole = cast(CoreSchema, {**handler(source), "fail_fast": True})
        return core_schema.no_info_wrap_validator_function(_in_pieces, whole)


def _in_pieces(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    if not isinstance(value, list) or len(value) <= _LIST_PIECE:
        return handler(value)
    checked: list[object] = []
    for start in range(0, len(value), _LIST_PIECE):
        try:
            checked += handler(value[start : start + _LIST_PIECE])
        except ValidationError as error:
            raise ValidationError.from_exception_data(
                error.title, [_moved(detail, start) for detail in error.errors(include_url=False)]
            ) from None
    return checked


def _moved(detail: ErrorDetails, start: int) -> InitErrorDetails:
    """An item's error with its index increased by `start`."""
    first, *rest = detail["loc"]
    place = (first + start if isinstance(first, int) else first, *rest)
    return InitErrorDetails(type=detail["type"], loc=place, input=detail["input"], ctx=detail.get("ctx", {}))


LongList = Annotated[list[Item], _InPieces()]


class BodyReader:
    """Parses and validates bodies; one medium and one large body at a time, in threads."""

    def __init__(self, limits: BodyLimits, revise: Callable[[JsonObject], JsonObject] | None = None) -> None:
        """`revise` may change a body before it is validated, in any thread."""
        self._limits, self._revise = limits, revise
        self._medium, self._large = CapacityLimiter(1), CapacityLimiter(1)

    async def read(self, request: Request, model: type[Model]) -> Model:
        """The body as `model`. Raises BadRequest, PayloadTooLarge, NotReady; ClientGone after a disconnect."""
        hold = hold_of(request.scope)
        limit = self._limits.of(request.scope["path"])
        headers = request.scope["headers"]
        declared = declared_bytes(headers) if coding_of(headers) is None else None
        raw = await _receive(request, declared or limit.max_bytes)
        limits = JsonLimits(max_values=limit.max_values)
        try:
            if len(raw) <= INLINE_BYTES:
                return self._validated(model, parse_json(raw, limits))
            return await unless_client_gone(request, self._off_the_loop(raw, limits, model))
        finally:
            if hold is not None:
                hold.release()

    async def _off_the_loop(self, raw: Bytes, limits: JsonLimits, model: type[Model]) -> Model:
        stop = threading.Event()  # stops the parser if the client disconnects
        try:
            return await anyio.to_thread.run_sync(
                lambda: self._validated(model, parse_json(raw, limits, stopped=stop.is_set)),
                abandon_on_cancel=True,
                limiter=self._medium if len(raw) <= _MEDIUM_BYTES else self._large,
            )
        finally:
            stop.set()

    def _validated(self, model: type[Model], value: JsonObject) -> Model:
        return validate(model, value if self._revise is None else self._revise(value))


class _JsonBody:
    """The dependency itself; the OpenAPI document reads its `model`."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model

    async def __call__(self, request: Request) -> BaseModel:
        check_content_type(request.headers.get("content-type"))
        return await cast(BodyReader, request.app.state.bodies).read(request, self.model)


def json_body(model: type[BaseModel]) -> params.Depends:
    """A dependency that yields the body as `model`. Raises BadRequest, UnsupportedMediaType, PayloadTooLarge."""
    return params.Depends(_JsonBody(model))


def body_model(dependency: object) -> type[BaseModel] | None:
    """The model of a dependency made by `json_body`, else None."""
    return dependency.model if isinstance(dependency, _JsonBody) else None


def check_content_type(value: str | None) -> None:
    """Refuse all but JSON in UTF-8. No type is refused too: browsers may send it across origins without a preflight."""
    media_type, _, parameters = (value or "").partition(";")
    media_type = media_type.strip().lower()
    charset = re.search(r'charset\s*=\s*"?([^\s";]+)', parameters.lower())
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if not is_json or (charset is not None and charset[1] not in {"utf-8", "utf8"}):
        raise UnsupportedMediaType("Send the body as JSON with 'Content-Type: application/json'.")


def parse_json(raw: Bytes, limits: JsonLimits = _ANY, *, stopped: Callable[[], bool] = lambda: False) -> JsonObject:
    """One JSON object: UTF-8, at most 64 levels deep, no duplicate keys, no NaN or Infinity, no lone surrogates.

    A byte-order mark at its start counts as white space.
    """
    raw = _without_mark(raw)
    if isinstance(raw, bytes) and len(raw) <= INLINE_BYTES:
        try:
            value = parse_text(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise invalid_json(f"not UTF-8 at byte {error.start}") from None
    else:
        value = parse_pieces(raw, limits, stopped=stopped)
    if not isinstance(value, dict):
        raise invalid_json("expected an object")
    return value


def _without_mark(raw: Bytes) -> Bytes:
    """The body with spaces in place of a byte-order mark, so that all places in it stay."""
    if raw[: len(BOM_UTF8)] != BOM_UTF8:
        return raw
    spaces = b" " * len(BOM_UTF8)
    if isinstance(raw, bytes):
        return spaces + raw[len(BOM_UTF8) :]
    raw[: len(BOM_UTF8)] = spaces
    return raw


def validate(model: type[Model], value: JsonObject) -> Model:
    """Strict validation: no string becomes a number, no float an integer, no boolean either."""
    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        raise _bad_request(error, value) from None


async def _receive(request: Request, most: int) -> Bytes:
    """The whole body, without a copy that outlives it elsewhere. Raises ClientGone."""
    buffer = BodyBuffer(most)
    try:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            buffer.add(message.get("body", b""))
            if not message.get("more_body", False):
                return buffer.take()
    finally:
        buffer.clear()


def _bad_request(error: ValidationError, value: JsonObject) -> BadRequest:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    lines: dict[str, None] = {}  # ordered, without the repetitions that unions cause
    for detail in details:
        param = _param(detail["loc"], value)
        lines[f"{param}: {_message(detail)}" if param else _message(detail)] = None
        if len(lines) == MAX_REPORTED_ERRORS:
            break
    codes = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
    return BadRequest(
        "; ".join(lines),
        param=_param(details[0]["loc"], value) or None,
        code=codes.get(details[0]["type"], "invalid_value"),
    )


def _message(detail: ErrorDetails) -> str:
    return short(detail["msg"].removeprefix("Value error, "), 200)


def _param(location: Sequence[int | str], value: object) -> str:
    """`messages[0].content`: the location without steps that only name a branch of a union."""
    path = ""
    for index, step in enumerate(location):
        if isinstance(step, int):
            if isinstance(value, list) and step < len(value):
                path, value = f"{path}[{step}]", value[step]
        elif isinstance(value, dict):
            if step in value:
                value = value[step]
            elif index < len(location) - 1:  # the last step may name a missing field
                continue
            path = f"{path}.{short(step)}" if path else short(step)
    return path

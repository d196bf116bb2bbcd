"""Strict JSON bodies: bytes to a validated pydantic model, for every POST route.

Promises: what a client got wrong is a BadRequest that names the field and never echoes the input at length.
Must not know: which routes exist, what the fields mean.

Use in a route:

    Body = Annotated[CompletionRequest, json_body(CompletionRequest)]

    @router.post("/v1/completions")
    async def create_completion(body: Body, request: Request) -> Response: ...

`json_body(Model)` is a FastAPI dependency: it checks the content type, parses with `parse_json`, validates strictly
with `validate`, and marks the route, so that /openapi.json documents the model as its request body. A model's
validators may raise ValueError (its text becomes the message) or any ApiError (passed through as it is). Lists stay
lists in strict mode: declare `list`, not `tuple`. Declare a list whose length the model does not bound as
`LongList[X]`: two million wrong items would otherwise become two million error records on the event loop.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, TypeVar, cast

from fastapi import Request, params
from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails

from quire_server.errors import BadRequest, UnsupportedMediaType

MAX_DEPTH = 64
MAX_NUMBER_CHARS = 40  # any double or 64-bit integer fits; the fields' own ranges do the rest
MAX_REPORTED_ERRORS = 10

Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")
JsonObject = dict[str, object]

# Every string literal, closed or not: possessive, so that no input makes it scan a byte twice.
_STRING = re.compile(r'"(?:[^"\\]++|\\.|\\\Z)*+"?', re.DOTALL)
_NOT_BRACKET = re.compile(r"[^\[\]{}]+")
_INNERMOST = re.compile(r"\[\]|\{\}")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class _FailFast:
    """Stop validating a list at its first wrong item. (pydantic's own marker cannot stand inside a union.)"""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cast(CoreSchema, {**handler(source), "fail_fast": True})


LongList = Annotated[list[Item], _FailFast()]


class _JsonBody:
    """The dependency itself; `model` is read back when the OpenAPI document is written."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.model = model

    async def __call__(self, request: Request) -> BaseModel:
        check_content_type(request.headers.get("content-type"))
        return validate(self.model, parse_json(await request.body()))


def json_body(model: type[BaseModel]) -> params.Depends:
    """A dependency that yields the body as `model`. Raises BadRequest, UnsupportedMediaType, PayloadTooLarge."""
    return params.Depends(_JsonBody(model))


def body_model(dependency: object) -> type[BaseModel] | None:
    """The model behind a dependency made by `json_body`, else None."""
    return dependency.model if isinstance(dependency, _JsonBody) else None


def check_content_type(value: str | None) -> None:
    """Only JSON in UTF-8. A missing type is refused too: browsers may send such a body across origins unasked."""
    media_type, _, parameters = (value or "").partition(";")
    media_type = media_type.strip().lower()
    charset = re.search(r'charset\s*=\s*"?([^\s";]+)', parameters.lower())
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if not is_json or (charset is not None and charset[1] not in {"utf-8", "utf8"}):
        raise UnsupportedMediaType("Send the body as JSON with 'Content-Type: application/json'.")


def parse_json(raw: bytes) -> JsonObject:
    """One JSON object: UTF-8, at most 64 levels deep, no duplicate keys, no NaN or Infinity, no lone surrogates."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid_json(f"not UTF-8 at byte {error.start}") from None
    _check_depth(text)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_int=_bounded_int,
            parse_float=_finite_float,
        )
    except json.JSONDecodeError as error:
        raise _invalid_json(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _invalid_json("nested too deeply") from None
    if not isinstance(value, dict):
        raise _invalid_json("expected an object")
    if _SURROGATE_ESCAPE.search(text):
        _check_surrogates(value)
    return value


def validate(model: type[Model], value: JsonObject) -> Model:
    """Strict validation: no string becomes a number, no float an integer, no boolean either."""
    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        raise _bad_request(error, value) from None


def _check_depth(text: str) -> None:
    brackets = _NOT_BRACKET.sub("", _STRING.sub("", text))
    for _ in range(MAX_DEPTH):  # each round removes the innermost level
        if not brackets:
            return
        brackets = _INNERMOST.sub("", brackets)
    if brackets:
        raise _invalid_json(f"brackets that do not match, or more than {MAX_DEPTH} levels deep")


def _unique_keys(pairs: list[tuple[str, object]]) -> JsonObject:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRequest(f"The key '{_short(key)}' occurs twice.", param=_short(key), code="duplicate_key")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> object:
    raise _invalid_json(f"{name} is not a JSON number")


def _bounded_int(digits: str) -> int:
    if len(digits) > MAX_NUMBER_CHARS:
        raise _invalid_json(f"a number of more than {MAX_NUMBER_CHARS} characters")
    return int(digits)


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _invalid_json("a number beyond the range of a double")
    return value


def _check_surrogates(value: JsonObject) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid_json("a lone surrogate escape, which is no character") from None


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
    return _short(detail["msg"].removeprefix("Value error, "), 200)


def _param(location: Sequence[int | str], value: object) -> str:
    """`messages[0].content`: the location without the steps that only name a branch of a union."""
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
            path = f"{path}.{_short(step)}" if path else _short(step)
    return path


def _invalid_json(reason: str) -> BadRequest:
    return BadRequest(f"The body is not valid JSON: {reason}.", code="invalid_json")


def _short(text: str, limit: int = 64) -> str:
    cleaned = text.encode("utf-8", "replace").decode("utf-8")
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"

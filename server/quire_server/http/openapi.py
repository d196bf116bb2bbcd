"""Completes the OpenAPI document with request bodies, errors and keys, which the framework does not see.

Promises: every status a route can answer is declared, with the schema of its envelope.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any, cast

from fastapi import APIRouter
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from quire_server.errors import (
    ApiError,
    BadRequest,
    DeadlineExceeded,
    ErrorBody,
    Forbidden,
    HeadersTooLarge,
    HostNotAllowed,
    MethodNotAllowed,
    ModelNotFound,
    NotReady,
    PayloadTooLarge,
    QueueFull,
    RequestTimeout,
    Unauthorized,
    UnsupportedMediaType,
)
from quire_server.http.access import PROBES
from quire_server.http.body import body_model
from quire_server.http.body_limits import BodyLimits
from quire_server.http.envelopes import AnthropicErrorBody, OllamaErrorBody, dialect_of
from quire_server.http.guard import PUBLIC_PATHS, is_admin_path

Document = dict[str, Any]  # JSON

ANY_ROUTE: tuple[type[ApiError], ...] = (BadRequest, MethodNotAllowed, HeadersTooLarge, ApiError)
WITH_KEY: tuple[type[ApiError], ...] = (Unauthorized,)
FOR_OPERATORS: tuple[type[ApiError], ...] = (Unauthorized, Forbidden)
WITH_BODY: tuple[type[ApiError], ...] = (
    ModelNotFound,
    RequestTimeout,
    PayloadTooLarge,
    UnsupportedMediaType,
    QueueFull,
    NotReady,
    DeadlineExceeded,
)
_REF = "#/components/schemas/{model}"
_ENVELOPE = "ErrorResponse"
_ENVELOPES = {"openai": _ENVELOPE, "anthropic": "AnthropicErrorResponse", "ollama": "OllamaErrorResponse"}
_BEARER = {"type": "http", "scheme": "bearer"}
_METHODS = frozenset({"get", "post", "put", "patch", "delete"})


def complete(
    document: Document,
    routers: Iterable[APIRouter],
    *,
    needs_key: bool,
    needs_admin_key: bool,
    limits: BodyLimits,
    looks_at_hosts: bool = False,
) -> Document:
    """Add request bodies, error replies and the key to the framework's document, in place. Returns it."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):  # validation errors are 400, in our envelope
        schemas.pop(name, None)
    schemas.update(_definitions(TypeAdapter(ErrorBody).json_schema(ref_template=_REF), _ENVELOPE))
    anthropic = TypeAdapter(AnthropicErrorBody).json_schema(ref_template=_REF)
    schemas.update(_definitions(anthropic, _ENVELOPES["anthropic"]))
    ollama = TypeAdapter(OllamaErrorBody).json_schema(ref_template=_REF)
    schemas.update(_definitions(ollama, _ENVELOPES["ollama"]))
    bodies = {
        (route.path_format, method.lower()): model
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
        for model in _body_models(route.dependant)
    }
    references, definitions = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(bodies.values())], ref_template=_REF
    )
    schemas.update(definitions.get("$defs", {}))
    for path, operations in document.get("paths", {}).items():
        for method, operation in operations.items():
            if method not in _METHODS:
                continue
            model = bodies.get((path, method))
            if model is not None:
                schema = references[model, "validation"]
                operation["requestBody"] = {
                    "description": f"At most {limits.of(path).max_bytes} bytes.",
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
            errors = ANY_ROUTE + _refusals(path, looks_at_hosts) + (WITH_BODY if model is not None else ())
            if any((each["in"], each["name"]) == ("query", "model") for each in operation.get("parameters", ())):
                errors += (ModelNotFound,)
            responses = operation.setdefault("responses", {})
            responses.pop("422", None)
            for error in errors:
                responses.setdefault(str(error.status), error_response(error, _envelope(path)))
            if is_admin_path(path):
                if needs_admin_key:
                    operation["security"] = [{"adminKey": []}]
            elif needs_key and path not in PUBLIC_PATHS:
                operation["security"] = [{"key": []}]
    schemes = {name: _BEARER for name, needed in (("key", needs_key), ("adminKey", needs_admin_key)) if needed}
    if schemes:
        document["components"]["securitySchemes"] = schemes
    document["components"]["schemas"] = {_short_name(name): schema for name, schema in schemas.items()}
    _shorten_references(document)
    return document


def _short_name(name: str) -> str:
    """Call `quire_server__dialects__chat__wire__Message` `ChatMessage`, and what dialects share by its class alone."""
    *modules, own = name.split("__")
    dialect = modules[2] if len(modules) == _MODULES_OF_A_DIALECT else ""
    return dialect.capitalize() + own


_MODULES_OF_A_DIALECT = 4  # quire_server, dialects, its folder, the module


def _shorten_references(node: Any) -> None:
    """Let references name the schemas by their short names, in place."""
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            node["$ref"] = _REF.format(model=_short_name(node["$ref"].rpartition("/")[2]))
        for each in node.values():
            _shorten_references(each)
    elif isinstance(node, list):
        for each in node:
            _shorten_references(each)


def _refusals(path: str, looks_at_hosts: bool) -> tuple[type[ApiError], ...]:
    if is_admin_path(path):
        return FOR_OPERATORS
    foreign = (HostNotAllowed,) if looks_at_hosts and path not in PROBES else ()
    return foreign if path in PUBLIC_PATHS else (*WITH_KEY, *foreign)


def error_response(error: type[ApiError], envelope: str = _ENVELOPE) -> Document:
    """The OpenAPI response object of one error; routes use it for statuses of their own."""
    response: Document = {
        "description": cast(str, error.__doc__).split(": ", 1)[-1].rstrip("."),
        "content": {"application/json": {"schema": {"$ref": _REF.format(model=envelope)}}},
    }
    if error.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        whole_seconds = {"schema": {"type": "integer", "minimum": 1}, "description": "seconds to wait"}
        response["headers"] = {"Retry-After": whole_seconds}
    return response


def generation_responses(
    whole: type[BaseModel], chunk: type[BaseModel], *, ending: str = "[DONE]"
) -> dict[int | str, Document]:
    """The OpenAPI responses object of a reply that is whole, or a stream of chunks that ends with `ending`."""
    schema = chunk.model_json_schema(mode="serialization")
    # One event in the form of OpenAPI 3.2.
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _inlined(schema, schema.get("$defs", {})),
    }
    said = {"anyOf": [data, {"const": ending}]} if ending == "[DONE]" else data
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": said}, "required": ["data"]}
    stream = {"schema": event}
    headers = {
        name: {"schema": {"type": "string"}, "description": description}
        for name, description in (
            ("x-quire-ignored", "fields that were accepted without effect"),
            ("x-quire-clamped", "values that were lowered, and to what"),
            ("x-quire-notes", "in words: what had no effect, what the chat template does not name"),
        )
    }
    return {
        200: {
            "model": whole,
            "description": f"the whole reply; with 'stream', events of which each holds one chunk, then {ending}",
            "content": {"text/event-stream": stream},
            "headers": headers,
        }
    }


def line_responses(reply: type[BaseModel]) -> dict[int | str, Document]:
    """The OpenAPI responses object of a reply that is whole, or a stream of lines of the same form."""
    schema = reply.model_json_schema(mode="serialization")
    lines = {"schema": _inlined(schema, schema.get("$defs", {}))}
    description = "lines of JSON, of which the last one is done; without 'stream' one that has all"
    return {200: {"model": reply, "description": description, "content": {"application/x-ndjson": lines}}}


def _envelope(path: str) -> str:
    return _ENVELOPES[dialect_of(path)]


def _inlined(schema: Any, definitions: Document) -> Any:
    """The schema with its references replaced by their definitions; none is recursive."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            return _inlined(definitions[schema["$ref"].rsplit("/", 1)[1]], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items() if key != "$defs"}
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    return schema


def _definitions(schema: Document, name: str) -> Document:
    nested: Document = schema.pop("$defs", {})
    return {**nested, name: {**schema, "title": name}}


def _body_models(dependant: Dependant) -> Iterator[type[BaseModel]]:
    for dependency in dependant.dependencies:
        model = body_model(dependency.call)
        if model is not None:
            yield model

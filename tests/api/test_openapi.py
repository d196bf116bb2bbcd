"""/openapi.json tells the truth: bodies, errors and the key are in it, and nothing that is not so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from quire_server.app import ROUTERS
from quire_server.http.access import PROBES
from quire_server.http.body import body_model
from quire_server.http.guard import PUBLIC_PATHS, is_admin_path
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio


def paths(method: str) -> dict[str, bool]:
    """Paths of the application's documented routes, and whether a body is declared."""
    return {
        route.path_format: any(body_model(each.call) for each in route.dependant.dependencies)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema and method in route.methods
    }


POSTS = tuple(path for path, has_body in paths("POST").items() if has_body)


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


DOCUMENTS: dict[str, dict[str, Any]] = {}  # by the options; each takes half a second to make


async def document(**options: object) -> dict[str, Any]:
    if repr(options) not in DOCUMENTS:
        async with connect(make_app(**options)) as client:
            headers = {"authorization": "Bearer key"}
            first = (await client.get("/openapi.json", headers=headers)).json()
            assert (await client.get("/openapi.json", headers=headers)).json() == first
            assert (await client.get("/docs", headers=headers)).status_code == 200
            DOCUMENTS[repr(options)] = first
    return DOCUMENTS[repr(options)]


async def test_schemas_have_short_names_of_their_own_and_routes_a_sentence() -> None:
    found = await document()
    names = found["components"]["schemas"]
    assert {"ChatMessage", "MessagesMessage", "OllamaMessage", "Reasoning", "ResponsesReasoning"} <= set(names)
    assert not [name for name in names if not name.isalnum()]
    assert len(names) > 150, "two schemas have been given one name"
    assert {name.rpartition("/")[2] for name in references(found)} <= set(names)
    operations = [(path, each) for path, methods in found["paths"].items() for each in methods.values()]
    assert [path for path, each in operations if not each.get("description")] == []


async def test_every_route_is_there() -> None:
    documented = (await document())["paths"]
    assert {path for path, operations in documented.items() if "post" in operations} == set(paths("POST"))
    assert {path for path, operations in documented.items() if "get" in operations} == set(paths("GET"))
    assert len(POSTS) > 20


async def test_every_reference_resolves() -> None:
    whole = await document()
    for reference in references(whole):
        node: Any = whole
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


async def test_posts_declare_their_body_and_errors() -> None:
    whole = await document()
    for path in POSTS:
        declares_its_body_and_errors(whole, path)


def declares_its_body_and_errors(whole: dict[str, Any], path: str) -> None:
    operation = whole["paths"][path]["post"]
    body = operation["requestBody"]
    assert body["required"] is True
    name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    schema = whole["components"]["schemas"][name]
    assert schema.get("properties") or len(schema["anyOf"]) > 1
    assert {"200", "400", "401", "404", "408", "413", "415", "429", "431", "500", "503"} <= set(operation["responses"])
    assert "422" not in operation["responses"]
    for status, response in operation["responses"].items():
        if int(status) >= 400:
            schema = response["content"]["application/json"]["schema"]
            envelope = "ErrorResponse"
            if path.startswith(("/v1/messages", "/api/")):
                envelope = "AnthropicErrorResponse" if path.startswith("/v1") else "OllamaErrorResponse"
            assert schema == {"$ref": f"#/components/schemas/{envelope}"}, status
    assert "Retry-After" in operation["responses"]["429"]["headers"]
    assert "Retry-After" in operation["responses"]["503"]["headers"]
    assert "parameters" not in operation


async def test_the_error_schema_is_the_envelope() -> None:
    schemas = (await document())["components"]["schemas"]
    assert schemas["ErrorResponse"]["required"] == ["error"]
    assert set(schemas["ErrorDetail"]["required"]) == {"message", "type", "param", "code"}
    assert schemas["AnthropicErrorResponse"]["required"] == ["type", "error", "request_id"]
    assert "HTTPValidationError" not in schemas


async def test_the_key_is_declared_where_it_is_needed() -> None:
    without = await document()
    assert "securitySchemes" not in without["components"]
    whole = await document(api_key=("key",))
    assert whole["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in PUBLIC_PATHS and not is_admin_path(path)), path


async def test_the_operators_key_is_declared_for_the_operators_routes() -> None:
    whole = await document(admin_api_key=("key",))
    assert set(whole["components"]["securitySchemes"]) == {"adminKey"}
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == is_admin_path(path), path
            assert ("403" in operation["responses"]) == is_admin_path(path), path


async def test_refusals_have_declared_statuses() -> None:
    app = make_app(max_body_bytes=1000, max_header_bytes=3000)
    declared = {path: set(app.openapi()["paths"][path]["post"]["responses"]) for path in POSTS}
    prompt = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [1], "max_tokens": 1}
    requests: list[dict[str, Any]] = [
        {"json": {}},
        {"json": {**prompt, "model": "nothing"}},
        {"json": {**prompt, "model": 1}},
        {"content": b"{"},
        {"content": b"x" * 2000, "headers": {"content-type": "application/json"}},
        {"json": prompt, "headers": {"a": "b" * 4000}},
        {"json": prompt, "headers": {"content-encoding": "gzip"}},
    ]
    async with connect(app) as client:
        for path, options in itertools.product(POSTS, requests):
            reply = await client.post(path, **options)
            assert 400 <= reply.status_code < 500, (path, options)
            assert str(reply.status_code) in declared[path], (path, options)


async def test_a_foreign_host_is_declared_where_it_is_refused() -> None:
    for hosts, refused in (((), True), (("*",), False)):
        whole = await document() if hosts else await document_of_this_machine()
        for path, operations in whole["paths"].items():
            expected = is_admin_path(path) or (refused and path not in PROBES)
            assert all(("403" in operation["responses"]) == expected for operation in operations.values()), path


async def document_of_this_machine() -> dict[str, Any]:
    async with connect(make_app(allowed_hosts=()), headers={"host": "localhost"}) as client:
        result: dict[str, Any] = (await client.get("/openapi.json")).json()
        return result


async def test_a_model_that_is_not_there_is_declared_where_the_address_may_name_one() -> None:
    responses = {
        (method, path): operation["responses"]
        for path, operations in (await document())["paths"].items()
        for method, operation in operations.items()
        if any((each["in"], each["name"]) == ("query", "model") for each in operation.get("parameters", ()))
    }
    assert ("get", "/ping") in responses
    async with connect(make_app()) as client:
        for (method, path), declared in responses.items():
            reply = await client.request(method, path, params={"model": "none-such"})
            assert reply.status_code in (404, 401, 403), path
            assert {"404", str(reply.status_code)} <= declared.keys(), path

"""Each field of each route of the OpenAPI document with values of the wrong type, size, range and form.

Promises: the document is the judge: what it does not allow must be refused, what it allows is served or refused, and
neither may be an error of the server's. Must not know: any route but for a good body of it.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from jsonschema import Draft202012Validator

from hostile.case import Case
from hostile.corpus.facts import LARGE, MARK, Facts, Raw, dumps, holds_raw, shown

DEEP = 70
SOME, SOME_NESTED = 5, 2  # values of those that a field could get
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_CHAT = {"messages": [{"role": "user", "content": MARK}], "max_tokens": 4}
_RICH_CHAT = {
    "messages": [
        {"role": "system", "content": MARK},
        {"role": "user", "content": [{"type": "text", "text": MARK}], "name": "a"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "user", "content": "a"},
    ],
    "max_tokens": 4,
    "tools": [_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "logit_bias": {"7": 1},
    "stop": ["@@"],
}
# A good body of each route that takes one; a route without an entry fails the run, so that none is forgotten.
# What operators do to a server.
OPERATORS = ("/admin", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
BODIES: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"prompt": MARK, "max_tokens": 4},
        {
            "prompt": [MARK],
            "max_tokens": 4,
            "logit_bias": {"7": 1},
            "stop": ["@@"],
            "stop_token_ids": [7],
            "bad_words": ["@"],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
        },
        {"prompt": [[1, 2]], "max_tokens": 4, "structured_outputs": {"choice": ["a", "b"]}},
        {"prompt": [1, 2], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "/v1/chat/completions": (_CHAT, _RICH_CHAT),
    "/v1/chat/completions/input_tokens": (_CHAT,),
    "/v1/embeddings": ({"input": [MARK]},),
    "/v1/score": ({"text_1": MARK, "text_2": [MARK]},),
    "/score": ({"queries": MARK, "documents": [MARK]},),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank"), ({"query": MARK, "documents": [MARK, {"text": MARK}], "top_n": 1},)
    ),
    **dict.fromkeys(("/classify", "/v1/classify"), ({"input": [MARK]},)),
    "/infill": ({"input_prefix": MARK, "input_suffix": "a", "n_predict": 4},),
    "/api/chat": (
        {
            "model": "quire-demo",
            "messages": [{"role": "user", "content": MARK}],
            "options": {"num_predict": 4},
            "stream": False,
        },
        {
            "model": "quire-demo",
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                {"role": "tool", "tool_name": "f", "content": MARK},
            ],
            "options": {"num_predict": 4, "stop": ["@@"]},
            "tools": [_TOOL],
        },
        {
            "model": "quire-demo",
            "messages": [{"role": "user", "content": "a"}],
            "format": _SCHEMA,
            "options": {"num_predict": 4},
        },
    ),
    "/api/generate": (
        {"model": "quire-demo", "prompt": MARK, "options": {"num_predict": 4}},
        {
            "model": "quire-demo",
            "prompt": MARK,
            "raw": True,
            "stream": False,
            "logprobs": True,
            "options": {"num_predict": 4},
        },
    ),
    "/api/embed": ({"model": "quire-demo", "input": [MARK]},),
    "/api/embeddings": ({"model": "quire-demo", "prompt": MARK},),
    "/api/show": ({"model": "quire-demo"},),
    "/v1/batches": ({"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},),
    "/tokenize": (
        {"prompt": MARK},
        {"messages": [{"role": "user", "content": MARK}], "tools": [_TOOL], "chat_template_kwargs": {}},
    ),
    "/detokenize": ({"tokens": [1, 2]},),
    "/v1/responses": (
        {"input": MARK, "max_output_tokens": 4, "store": False},
        {
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": MARK}]}],
            "max_output_tokens": 4,
            "store": False,
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
            "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
            "reasoning": {"effort": "low"},
            "metadata": {"a": "b"},
        },
    ),
    "/v1/responses/input_tokens": ({"input": MARK},),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": MARK}], "max_tokens": 4},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": MARK}]}],
            "max_tokens": 4,
            "system": [{"type": "text", "text": MARK}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
        },
    ),
    "/v1/messages/count_tokens": ({"messages": [{"role": "user", "content": MARK}]},),
}
# Not every model writes the middle of a text, or sorts texts into classes.
_BY_MODEL = ("/infill", "/classify", "/v1/classify")
_DIGITS = Raw("1" * 5000, "an integer of 5,000 digits")
_SURROGATE = Raw('"\\ud800"')
_DEEP = Raw("[" * DEEP + "]" * DEEP, f"{DEEP} arrays in each other")
_TWICE = Raw('{"a":1,"a":2}')
_CONSTANTS = (Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-1e999"))
_BY_TYPE: dict[str, tuple[object, ...]] = {
    "number": (*_CONSTANTS, 1e308, 1e-45, -1e-9, "NaN", "1", True, [1], {}, 2**64),
    "integer": (*_CONSTANTS[::2], _DIGITS, -1, 0, 2**31, 2**63, 2**64, -(2**63) - 1, 1.5, "1", True, [1], {}),
    "string": (1, True, [], {}, "", "x" * 20_000, "a\x00b", _SURROGATE, "\U0001f600\u202e\ufeff", "{{ 7 * 7 }}"),
    "array": ("a", 1, {}, [], [[]], [None], [{}], [1.5], [True], [2**64], [""], _DEEP, ["a"] * 3000, [0] * 3000),
    "object": ("a", 1, [], {}, {"": None}, {str(i): 1 for i in range(3000)}, _TWICE, {"a": _DEEP}, {"__class__": 1}),
    "boolean": ("true", 1, 0, 2.0, [], {}),
}
_NESTED: tuple[object, ...] = (None, 1, "x", [], {}, True, _SURROGATE, Raw("NaN"))


def cases(facts: Facts) -> Iterator[Case]:
    for path, operation in _posts(facts.document):
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        validator = Draft202012Validator({**schema, "components": facts.document["components"]})
        model = facts.document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        if path not in BODIES:
            raise LookupError(f"{path} is new: give a good body of it in {__name__}.BODIES")
        yield from _good(facts, path, validator)
        for name, property_ in model.get("properties", {}).items():  # a choice of bodies has none of its own
            values = _values(property_, facts.document)
            for value in values if facts.thorough else _some(values, SOME, f"{path} {name}"):
                yield _case(facts, path, {**BODIES[path][0], name: value}, f"{name} = {shown(value)}", validator)
        for body in BODIES[path]:
            for where in _leaves(body):
                name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where)[1:]
                for value in _NESTED if facts.thorough else _some(_NESTED, SOME_NESTED, f"{path} {name}"):
                    yield _case(facts, path, _with(body, where, value), f"{name} = {shown(value)}", validator)
        yield from _forms(facts, path)


def _posts(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The routes that take a body of JSON; what operators may do to a server is no client's."""
    for path, operations in document["paths"].items():
        if takes_json(operations.get("post", {})) and not path.startswith(OPERATORS):
            yield path, operations["post"]


def takes_json(operation: dict[str, Any]) -> bool:
    """Whether an operation of the document has a body of JSON, and no form."""
    return "application/json" in operation.get("requestBody", {}).get("content", {})


def _good(facts: Facts, path: str, validator: Draft202012Validator) -> Iterator[Case]:
    """The bodies themselves, so that what is refused is refused for what was changed."""
    for number, body in enumerate(BODIES[path]):
        wrong = next(validator.iter_errors(body), None)
        if wrong is not None:
            raise LookupError(f"body {number} of {path} is not what the document describes: {wrong.message[:200]}")
        # The server that is attacked keeps no files, so a batch finds none.
        expected = {404} if path == "/v1/batches" else {200, 400} if path in _BY_MODEL else {200}
        yield facts.case("good bodies", f"as it should be ({number})", path, body, expected)


def _values(property_: dict[str, Any], document: dict[str, Any]) -> list[object]:
    """What may be wrong with a field of these types."""
    types = _types(property_, document)
    values: list[object] = [None, *(value for name in sorted(types) for value in _BY_TYPE.get(name, ()))]
    return [value for i, value in enumerate(values) if not any(_same(value, earlier) for earlier in values[:i])]


def _some(values: Sequence[object], most: int, what: str) -> Iterator[object]:
    """Different ones for each field, the same in each run; all fields together get all of them."""
    start = zlib.crc32(what.encode())
    for i in range(min(most, len(values))):
        yield values[(start + i * len(values) // most) % len(values)] if len(values) > most else values[i]


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _types(schema: dict[str, Any], document: dict[str, Any]) -> set[str]:
    if "$ref" in schema:
        return _types(document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], document)
    types = {schema["type"]} if isinstance(schema.get("type"), str) else set(schema.get("type", ()))
    for branch in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        types |= _types(branch, document)
    if "enum" in schema or "const" in schema:
        types.add("string")
    return types or {"object"}


def _case(facts: Facts, path: str, body: dict[str, Any], name: str, validator: Draft202012Validator) -> Case:
    expected = {400} if holds_raw(body) or not validator.is_valid(body) else {200, 400, 404, 504}
    if len(dumps(body)) > LARGE:
        expected.add(413)
    return facts.case("fields", name, path, body, expected, quotes=("{{ 7 * 7 }}",))


def _leaves(value: object, where: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """All places inside a body that are not at its top."""
    if len(where) > 1:
        yield where
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, (*where, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*where, index))


def _with(body: dict[str, Any], where: tuple[str | int, ...], value: object) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    inner: Any = changed
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = value
    return changed


def _forms(facts: Facts, path: str) -> Iterator[Case]:
    """The same body with a field that nobody knows, one twice, one missing, and wrapped in another."""
    body = BODIES[path][0]
    first = next(iter(body))
    text = dumps(body)
    escaped = "".join(f"\\u{ord(character):04x}" for character in first)
    yield facts.case("forms", "a field nobody knows", path, {**body, "no_such_field": {"a": 1}}, {200, 400})
    yield facts.case("forms", "a field with a strange name", path, {**body, "\u202e" * 300: 1}, {200, 400})
    yield facts.case("forms", "the first field twice", path, f'{text[:-1]},"{first}":1}}'.encode(), {400})
    yield facts.case("forms", "twice, once escaped", path, f'{text[:-1]},"{escaped}":1}}'.encode(), {400})
    yield facts.case("forms", "without its first field", path, {k: v for k, v in body.items() if k != first}, {400})
    yield facts.case("forms", "in a list", path, [body], {400})
    yield facts.case("forms", "in an object", path, {"body": body}, {400})
    yield facts.case("forms", "as a text", path, dumps(text).encode(), {400})

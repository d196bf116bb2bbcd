"""Schemas of every keyword that a grammar enforces, as people write them, and others drawn from their parts.

Promises: each has values; `examples` stand for those of patterns and formats, and `$names` for the names of a pattern.
"""

from __future__ import annotations

from random import Random
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]


def of_object(properties: Schema, *required: str, more: Any = None) -> Schema:
    """An object's schema; `more`: its additionalProperties."""
    found: Schema = {"type": "object", "properties": properties, "required": list(required)}
    return found if more is None else {**found, "additionalProperties": more}


TEXT, INTEGER, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
SCHEMAS: dict[str, Schema] = {
    "any value": {},
    "any object": {"type": "object"},
    "any array": {"type": "array"},
    "a text": TEXT,
    "an integer": INTEGER,
    "a number": NUMBER,
    "read_file": of_object({"path": TEXT, "offset": INTEGER, "limit": INTEGER}, "path"),
    "read_file, closed": of_object({"path": TEXT, "offset": INTEGER, "limit": INTEGER}, "path", more=False),
    "read_file, more are integers": of_object({"path": TEXT, "offset": INTEGER}, "path", more=INTEGER),
    "search": of_object(
        {
            "query": {"type": "string", "minLength": 1, "maxLength": 20},
            "path": TEXT,
            "glob": TEXT,
            "case_sensitive": FLAG,
            "max_results": {"type": "integer", "minimum": 1, "maximum": 100},
        },
        "query",
        more=False,
    ),
    "all required": of_object(
        {"a": TEXT, "b": INTEGER, "c": FLAG, "d": {"type": "null"}}, "a", "b", "c", "d", more=False
    ),
    "required last": of_object({"note": TEXT, "id": INTEGER, "body": TEXT}, "body", "id"),
    "required but not declared": of_object({"a": TEXT}, "b"),
    "names that begin alike": of_object({"a": TEXT, "ab": INTEGER, "abc": FLAG, "b": NUMBER}, "ab", more=False),
    "names that begin alike, open": of_object({"name": TEXT, "name_1": INTEGER, "na": FLAG}, "name"),
    "names to be escaped": of_object(
        {'q"': TEXT, "b\\s": INTEGER, "n\nl": FLAG, "\u00e9": NUMBER, "\U0001f600": TEXT, "a/b": INTEGER, "": FLAG},
        'q"',
        "\u00e9",
        more=False,
    ),
    "ten optional": of_object({f"field_{i}": (TEXT, INTEGER, FLAG)[i % 3] for i in range(10)}, more=False),
    "one constant": of_object({"a": {"const": "x"}}, "a", more={"type": "integer", "minimum": 5, "maximum": 5}),
    "enum of texts": {
        "enum": [
            "a",
            "ab",
            'say "x"',
            "caf\u00e9",
            "\u65e5\u672c\u8a9e",
            "\U0001f600",
            "a/b",
            "line\nend",
            "<think>",
            "",
        ]
    },
    "enum of all kinds": {"enum": ["1", 1, 1.5, True, None, [1, "x"], {"a": 1, "b": [2]}, -7]},
    "large constants": {"enum": [9007199254740993, 1234567890123456789, -(10**30), 12345678901234567890123]},
    "constant fraction": {"enum": [0.1, 2.50, 1e-7, 123456.789]},
    "constant object": {"const": {"a": [1, 2], "b": {"c": None}}},
    "tool with large ids": of_object(
        {"message_id": {"type": "integer", "enum": [1234567890123456789, 1234567890123456790]}},
        "message_id",
        more=False,
    ),
    "bounded integer": {"type": "integer", "minimum": -3, "maximum": 120},
    "large bounds": {"type": "integer", "minimum": 9007199254740993, "maximum": 9007199254740999},
    "least integer": {"type": "integer", "minimum": 0},
    "exclusive bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "bounded number": {"type": "number", "minimum": 0, "maximum": 1},
    "number from a fraction on": {"type": "number", "minimum": -0.5, "maximum": 99.5},
    "multiples": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    "short text": {"type": "string", "minLength": 2, "maxLength": 5},
    "one character": {"type": "string", "minLength": 1, "maxLength": 1},
    "long text": {"type": "string", "maxLength": 200},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]+$", "examples": ["ab-1", "abcd-007"]},
    "pattern anywhere": {"type": "string", "pattern": "x[0-9]", "examples": ["x1", 'say "x7"\n', "\u00e9x9\u00e9"]},
    "pattern of any characters": {
        "type": "string",
        "pattern": "^.{1,3}$",
        "examples": ["a", "\u00e9\u00e9\u00e9", '"\\/', "\U0001f600\U0001f600\U0001f600"],
    },
    "pattern of escapes": {"type": "string", "pattern": '^"[^"]*"$', "examples": ['"x"', '"a\\b"', '""']},
    "pattern beyond ASCII": {
        "type": "string",
        "pattern": "^[\u00e0-\u00ff\u65e5\u672c]+$",
        "examples": ["\u00e9\u00e8", "\u65e5\u672c\u00e0"],
    },
    "path": {"type": "string", "pattern": "^/([a-z]+/)*[a-z]+$", "examples": ["/a/b", "/etc/x"]},
    "date": {"type": "string", "format": "date", "examples": ["2024-02-29", "2023-02-28", "2000-02-29", "1999-12-31"]},
    "date-time": {
        "type": "string",
        "format": "date-time",
        "examples": ["2024-02-29T23:59:59Z", "2023-01-31T00:00:00.123+02:00"],
    },
    "email": {"type": "string", "format": "email", "examples": ["a@example.com", "first.last@mail.example.org"]},
    "uuid": {"type": "string", "format": "uuid", "examples": ["123e4567-e89b-12d3-a456-426614174000"]},
    "ipv4": {"type": "string", "format": "ipv4", "examples": ["127.0.0.1", "255.255.255.255"]},
    "list": {"type": "array", "items": INTEGER},
    "short list": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
    "at most one item": {"type": "array", "items": TEXT, "maxItems": 1},
    "one item": {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 1},
    "no item": {"type": "array", "maxItems": 0},
    "map of at most one": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 1},
    "empty object": {"type": "object", "additionalProperties": False},
    "tuple": {"type": "array", "prefixItems": [TEXT, INTEGER], "items": False},
    "tuple and more": {"type": "array", "prefixItems": [TEXT], "items": INTEGER, "minItems": 2},
    "list of objects": {
        "type": "array",
        "items": of_object({"id": INTEGER, "tag": TEXT}, "id", more=False),
        "maxItems": 3,
    },
    "map": {"type": "object", "additionalProperties": NUMBER},
    "map that is not empty": {"type": "object", "additionalProperties": TEXT, "minProperties": 1},
    "names of a pattern": {
        "type": "object",
        "patternProperties": {"^x_": {**INTEGER, "$names": ["x_1", "x_caf\u00e9", "x_\\"]}},
        "additionalProperties": False,
    },
    "names of a pattern beside a declared one": {
        **of_object({"id": TEXT}, "id", more=False),
        "patternProperties": {"^x_": {**INTEGER, "$names": ["x_a", "x_b"]}},
    },
    "nullable": of_object(
        {"a": {"type": ["string", "null"]}, "b": {"anyOf": [INTEGER, {"type": "null"}]}}, "a", "b", more=False
    ),
    "any of": {"anyOf": [TEXT, of_object({"a": INTEGER}, "a", more=False), {"type": "array", "items": FLAG}]},
    "one of, by a constant": {
        "oneOf": [
            of_object({"kind": {"const": "circle"}, "r": NUMBER}, "kind", "r", more=False),
            of_object({"kind": {"const": "box"}, "w": NUMBER, "h": NUMBER}, "kind", "w", "h", more=False),
        ]
    },
    "all of": {"allOf": [of_object({"a": INTEGER}, "a"), of_object({"b": TEXT}, "b")]},
    "references": {
        "$defs": {"point": of_object({"x": INTEGER, "y": INTEGER, "label": TEXT}, "x", "y", more=False)},
        **of_object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}, "from", more=False),
    },
    "tree": {
        "$defs": {
            "node": of_object(
                {"value": INTEGER, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
                "value",
                more=False,
            )
        },
        "$ref": "#/$defs/node",
    },
    "nested": of_object(
        {
            "user": of_object({"name": TEXT, "age": {"type": "integer", "minimum": 0}}, "name", more=False),
            "tags": {"type": "array", "items": TEXT},
        },
        "user",
        more=False,
    ),
}

_PARTS = (
    TEXT,
    INTEGER,
    NUMBER,
    FLAG,
    {"type": "null"},
    {},
    {"type": "string", "maxLength": 6},
    {"enum": ["x", "xy", 1, None]},
    {"type": "integer", "minimum": -5, "maximum": 300},
    {"type": ["string", "integer"]},
    {"const": "\u00e9"},
)
_NAMES = ("id", "i", "idx", "name", "nam", "names", "path", "offset", "limit", "off", "\u00e9", "a b", "type", "x-y")


def drawn_schema(draw: Random, depth: int = 0) -> Schema:
    """An object with some of the usual names, in any order, some of them required; its parts are drawn too."""
    names = draw.sample(_NAMES, draw.randint(1, 7))
    properties: Schema = {name: _part(draw, depth) for name in names}
    required = [name for name in names if draw.random() < 0.4]
    return of_object(properties, *required, more=draw.choice((None, False, False, True, INTEGER)))


def _part(draw: Random, depth: int) -> Schema:
    way = draw.random()
    if depth < 2 and way < 0.15:
        return drawn_schema(draw, depth + 1)
    if depth < 2 and way < 0.3:
        return {"type": "array", "items": _part(draw, depth + 1), "maxItems": draw.randint(1, 4)}
    if way < 0.4:
        return {"anyOf": [draw.choice(_PARTS[:3]), {"type": "null"}]}
    return dict(draw.choice(_PARTS))

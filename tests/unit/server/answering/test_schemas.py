"""JSON schemas before they become grammars: what is kept, what is made new, and what is refused with its place."""

from __future__ import annotations

import json
import re

import pytest

from quire_server.answering.constraining.json_schema import FORMATS, SchemaRefused
from quire_server.answering.constraining.schemas import (
    MAX_SCHEMA_CHARS,
    MAX_SCHEMA_DEPTH,
    UNSUPPORTED,
    UNSUPPORTED_FORMATS,
    parsed,
    reviewed,
)
from support.documents import section

STRING = {"type": "string"}


def refusal(schema: dict[str, object]) -> str:
    with pytest.raises(SchemaRefused) as refused:
        reviewed(schema)
    return str(refused.value)


NARROWING: dict[str, object] = {
    "not": STRING, "if": STRING, "dependencies": {"a": ["b"]}, "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": STRING}, "contains": STRING, "propertyNames": {"pattern": "a"}, "uniqueItems": True,
    "unevaluatedProperties": False, "unevaluatedItems": False, "$dynamicRef": "#a", "$recursiveRef": "#",
    "extends": STRING, "disallow": "string", "divisibleBy": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize(
    ("around", "place"),
    [
        (lambda inner: inner, "#"),
        (lambda inner: {"properties": {"x": inner}}, "#/properties/x"),
        (lambda inner: {"items": {"anyOf": [STRING, inner]}}, "#/items/anyOf/1"),
        (lambda inner: {"items": [inner]}, "#/prefixItems/0"),
        (lambda inner: {"$defs": {"d": inner}}, "#/$defs/d"),
        (lambda inner: {"$ref": "#/components/schemas/d", "components": {"schemas": {"d": inner}}}, "#/components/"),
        (lambda inner: {"patternProperties": {"a": {"additionalProperties": inner}}}, "#/patternProperties/a/addit"),
    ],
)
def test_what_narrows_and_cannot_be_enforced_is_refused_where_it_stands(name: str, around, place: str):
    said = refusal(around({name: NARROWING[name]}))
    assert f"'{name}' at {place}" in said


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"dependencies": {}},
        {"propertyNames": {"type": "string"}},
        {"unevaluatedProperties": True},
        {"then": STRING, "else": STRING},
        {"minContains": 2},
        {"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "deprecated": True},
        {"$schema": "http://json-schema.org/draft-04/schema#"},
        {"x-guidance": {"lenient": True}},
        *[{"type": "string", "format": name} for name in ("int32", "password", "color")],
        {"type": "integer", "format": "uri-reference"},
    ],
)
def test_what_narrows_nothing_is_dropped(schema: dict[str, object]):
    assert reviewed({"properties": {"a": dict(schema)}}) == {
        "properties": {"a": {k: v for k, v in schema.items() if k == "type"}}
    }


def test_names_and_constants_are_no_keywords():
    schema = {
        "properties": {"not": STRING, "title": STRING, "if": {"const": {"not": 1, "title": 2}}},
        "enum": [{"uniqueItems": True}],
        "required": ["not"],
    }
    assert reviewed(json.loads(json.dumps(schema))) == schema


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        ({"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}),
        ({"exclusiveMaximum": 3}, {"exclusiveMaximum": 3}),
        ({"items": [STRING]}, {"prefixItems": [STRING]}),
        ({"items": [STRING], "additionalItems": False}, {"prefixItems": [STRING], "items": False}),
        ({"items": STRING, "additionalItems": False}, {"items": STRING}),
    ],
)
def test_older_drafts_are_made_new(older: dict[str, object], newer: dict[str, object]):
    assert reviewed(older) == newer


@pytest.mark.parametrize("name", FORMATS)
def test_known_formats_are_kept(name: str):
    schema = {"type": ["string", "null"], "format": name}
    assert reviewed(dict(schema)) == schema


@pytest.mark.parametrize("name", UNSUPPORTED_FORMATS)
def test_other_formats_of_the_standard_are_refused(name: str):
    assert f"the format '{name}' at #/items" in refusal({"items": {"format": name}})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "http://example.org/a.json"}, "'$ref' at # leads out of the schema"),
        ({"items": {"$ref": "other.json#/a"}}, "'$ref' at #/items leads out"),
        ({"$ref": 1}, "leads out of the schema"),
        ({"$ref": "#/$defs/a", "$defs": {"b": {}}}, "'$ref' at # leads to #/$defs/a, which is not there"),
        ({"$ref": "#/required", "required": ["a"]}, "leads to something that is no schema"),
        ({"minProperties": 2}, "'minProperties' at # is not supported"),
        ({"properties": {"a": {"required": True}}}, "'required' at #/properties/a must be a list"),
        ({"anyOf": {}}, "'anyOf' at # must be a list"),
    ],
)
def test_other_refusals(schema: dict[str, object], said: str):
    assert said in refusal(schema)


def test_references_are_followed():
    schema = {"$ref": "#/a~1b/c%20d/0", "a/b": {"c d": [{"properties": {"x": {"$ref": "#"}}}]}}
    assert reviewed(json.loads(json.dumps(schema))) == schema


def test_least_properties_that_are_required_anyway():
    schema = {"required": ["a", "b"], "minProperties": 2}
    assert reviewed(dict(schema)) == schema


def test_depth_and_size_are_bounded():
    deep: dict[str, object] = {}
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        deep = {"items": deep}
    assert "deeper than" in refusal(deep)
    with pytest.raises(SchemaRefused, match=f"at most {MAX_SCHEMA_CHARS}"):
        parsed(json.dumps({"enum": ["x" * MAX_SCHEMA_CHARS]}))
    with pytest.raises(SchemaRefused, match="not JSON"):
        parsed("[" * 60_000)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "false", "null", '"a"'])
def test_texts_that_are_no_schema(text: str):
    with pytest.raises(SchemaRefused):
        parsed(text)
    assert parsed("true") == {}


def test_lenient_drops_what_cannot_be_enforced():
    schema = {
        "properties": {"a": {"type": "array", "uniqueItems": True, "not": {}}, "b": {"format": "regex"}},
        "minProperties": 3,
    }
    assert reviewed(schema, lenient=True) == {"properties": {"a": {"type": "array"}, "b": {}}}
    with pytest.raises(SchemaRefused):
        reviewed({"$ref": "#/nowhere"}, lenient=True)


def test_the_api_page_lists_what_is_refused():
    page = section("docs/api.md", "Structured output")
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| ")]
    by_first = {tuple(re.findall(r"`([^`]+)`", what)): outcome for what, outcome in rows}
    assert by_first[UNSUPPORTED].startswith("refused")
    assert by_first[UNSUPPORTED_FORMATS].startswith("refused")
    assert by_first[tuple(FORMATS)].startswith("enforced")


def test_long_constants_are_refused():
    """The engine looks at all of a forced text for each of its tokens."""
    for keyword, value in (("const", "a" * 4097), ("enum", ["b", "a" * 4097])):
        with pytest.raises(SchemaRefused, match=r"a constant at #/properties/x has more than 4096 characters"):
            reviewed({"type": "object", "properties": {"x": {keyword: value}}})
    assert reviewed({"const": "a" * 4096}) == {"const": "a" * 4096}

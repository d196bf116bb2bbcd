"""Pieces of Lark in llguidance's dialect, and the check of JSON schemas for such a grammar.

A keyword that narrows an answer and cannot be enforced is refused with its place, but for those in docs/api.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import TypeAlias, cast

from quire_server.answering.constraining.json_schema import FORMATS, PLAIN_INTEGERS, SchemaRefused, grammar, resolved
from quire_server.text.parsing.reasoning import TokenId

ANY_TEXT = "/(?s:.*)/"


def literal(value: str) -> str:
    """A terminal for exactly this text."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def written(value: str, marks: Iterable[str], token_id: TokenId) -> str:
    """Terminals for exactly this text. Marks that are special tokens are written by id, as in the model's training."""
    ids = {mark: token_id(mark) for mark in marks if mark}
    known = {mark: found for mark, found in ids.items() if found is not None}
    pieces = re.split(f"({'|'.join(map(re.escape, known))})", value) if known else [value]
    return " ".join(f"<[{known[piece]}]>" if piece in known else literal(piece) for piece in pieces if piece)


def expression(pattern: str) -> str:
    """A terminal for texts that match a regular expression as a whole."""
    escaped = re.sub(r"\\.|/|\n|\r", _escaped, pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def ending_in(mark: str) -> str:
    """A text up to and including the first `mark`; for lazy rules."""
    return expression(f"(?s:.*){_plain(mark)}")


def without(mark: str) -> str:
    """A text without `mark`; for terminals."""
    return f"{ANY_TEXT} & ~{expression(f'(?s:.*){_plain(mark)}(?s:.*)')}"


def not_beginning_with(characters: str) -> str:
    """A text whose first character after spaces is none of these."""
    return expression(rf"\s{{0,4}}[^\s{_plain(characters)}](?s:.*)")


def json_value(schema: Mapping[str, object], *, compact: bool = False, lenient: bool = False) -> str:
    """A JSON value that conforms to the schema; `compact`: without whitespace between its parts.

    Raises SchemaRefused.
    """
    return f"%lark {{\n{grammar(schema, compact=compact, lenient=lenient)}\n}}"


def _plain(value: str) -> str:
    """A text escaped for a regular expression. Rust knows fewer escapes than Python's `re.escape` makes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&\-~/]", lambda found: "\\" + found[0], value)


def _escaped(found: re.Match[str]) -> str:
    """Escape characters that would end the expression or its line; keep existing escapes."""
    return {"/": "\\/", "\n": "\\n", "\r": "\\r", "\\\n": "\\n", "\\\r": "\\r"}.get(found[0], found[0])


Schema: TypeAlias = dict[str, object]

MAX_SCHEMA_CHARS = 65_536
MAX_SCHEMA_DEPTH = 64
MAX_CONSTANT_CHARS = 4096  # of one forced text: each of its tokens costs time for all of it

# Keywords with subschemas: a schema, a list of schemas, a map of schemas.
_ONE = ("additionalItems", "additionalProperties", "items")
_LIST = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAP = ("$defs", "definitions", "patternProperties", "properties")
# These narrow the valid values, and a grammar cannot express them.
UNSUPPORTED = (
    "not", "if", "dependencies", "dependentRequired", "dependentSchemas", "contains", "propertyNames", "uniqueItems",
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy",
)  # fmt: skip
# These have no effect without the keywords that they belong to, which are refused.
_ACCESSORIES = ("then", "else", "minContains", "maxContains")
_ANNOTATIONS = (
    "title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly",
    "$vocabulary", "x-guidance",
)  # fmt: skip
# Formats of the standard beside those that the grammar enforces. Unknown formats are annotations.
UNSUPPORTED_FORMATS = (
    "idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer",
    "uri-reference", "uri-template",
)  # fmt: skip


def parsed(text: str) -> Schema:
    """Parse a schema that was sent as text, its numbers as they are written. Raises SchemaRefused."""
    check_size(text)
    try:
        value = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        raise SchemaRefused(f"the schema is not JSON: {error}") from None
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise SchemaRefused("the schema must be an object")
    return value


def check_size(text: str) -> None:
    if len(text) > MAX_SCHEMA_CHARS:
        raise SchemaRefused(f"the schema has {len(text)} characters of at most {MAX_SCHEMA_CHARS}")


def reviewed(schema: Schema, *, lenient: bool = False) -> Schema:
    """Check a schema and remove the keywords that have no effect. Changes `schema`. Raises SchemaRefused.

    `lenient` drops keywords that cannot be enforced, for tools that are not strict.
    """
    _Review(schema, lenient).run()
    return schema


class _Review:
    def __init__(self, root: Schema, lenient: bool) -> None:
        self._root = root
        self._lenient = lenient
        self._seen: set[int] = set()
        self._references: list[tuple[str, str]] = []  # each with its place

    def run(self) -> None:
        dialect = self._root.get("$schema")
        self._walk(self._root, "#", 0)
        while self._references:
            reference, path = self._references.pop()
            target = resolved(self._root, reference, path)
            if isinstance(target, dict):
                self._walk(cast(Schema, target), reference, 0)
        if isinstance(dialect, str) and any(name in dialect for name in PLAIN_INTEGERS):
            self._root["$schema"] = dialect

    def _walk(self, schema: Schema, path: str, depth: int) -> None:
        if id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        if depth > MAX_SCHEMA_DEPTH:
            raise SchemaRefused(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        for name in _ANNOTATIONS:
            schema.pop(name, None)
        self._review_keywords(schema, path)
        _modernise(schema, path)
        self._review_format(schema, path)
        reference = schema.get("$ref")
        if reference is not None:
            self._references.append((cast(str, reference), path))
        constants = schema.get("enum")
        for constant in [*(constants if isinstance(constants, list) else ()), schema.get("const")]:
            if isinstance(constant, str) and len(constant) > MAX_CONSTANT_CHARS:
                raise SchemaRefused(f"a constant at {path} has more than {MAX_CONSTANT_CHARS} characters")
        for below, where in _subschemas(schema, path):
            self._walk(below, where, depth + 1)

    def _review_keywords(self, schema: Schema, path: str) -> None:
        for name in _ACCESSORIES:
            schema.pop(name, None)
        for name in UNSUPPORTED:
            if name not in schema:
                continue
            if not self._lenient and not _has_no_effect(name, schema[name]):
                raise SchemaRefused(f"'{name}' at {path} is not supported")
            del schema[name]
        least = schema.get("minProperties")
        required = schema.get("required")
        named = len(required) if isinstance(required, list) else 0
        if type(least) is int and least > max(named, 1):
            # The grammar leaves the keys of a map free, so they may repeat.
            if not self._lenient:
                raise SchemaRefused(f"'minProperties' at {path} is not supported beyond 1 and the required properties")
            del schema["minProperties"]
        if isinstance(required, bool):
            raise SchemaRefused(f"'required' at {path} must be a list of names")

    def _review_format(self, schema: Schema, path: str) -> None:
        name = schema.get("format")
        kind = schema.get("type", "string")
        is_text = kind == "string" or (isinstance(kind, list) and "string" in kind)
        if name is None or (is_text and name in FORMATS):
            return
        if is_text and name in UNSUPPORTED_FORMATS and not self._lenient:
            raise SchemaRefused(f"the format '{name}' at {path} is not supported")
        del schema["format"]


def _subschemas(schema: Schema, path: str) -> Iterator[tuple[Schema, str]]:
    """The direct subschemas of this one, with their places."""
    for name in _ONE:
        if isinstance(below := schema.get(name), dict):
            yield below, f"{path}/{name}"
    for name in _LIST:
        if isinstance(below := schema.get(name), list):
            yield from ((each, f"{path}/{name}/{i}") for i, each in enumerate(below) if isinstance(each, dict))
    for name in _MAP:
        if isinstance(below := schema.get(name), dict):
            yield from ((each, f"{path}/{name}/{key[:64]}") for key, each in below.items() if isinstance(each, dict))


def _modernise(schema: Schema, path: str) -> None:
    """Rewrite keywords of drafts before 2020-12, some of which the library would ignore."""
    schema.pop("$schema", None)
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and bound in schema:
            schema[exclusive] = schema.pop(bound)
    items = schema.get("items")
    if isinstance(items, list):
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema["additionalItems"]
    schema.pop("additionalItems", None)
    for name in _LIST:
        if name in schema and not isinstance(schema[name], list):
            raise SchemaRefused(f"'{name}' at {path} must be a list of schemas")


def _has_no_effect(name: str, value: object) -> bool:
    if name == "uniqueItems":
        return value is False
    if name in ("dependencies", "dependentRequired", "dependentSchemas"):
        return value == {}
    if name == "propertyNames":
        return value in (True, {}, {"type": "string"})
    if name in ("unevaluatedProperties", "unevaluatedItems"):
        return value is True or value == {}
    return name == "not" and value is False

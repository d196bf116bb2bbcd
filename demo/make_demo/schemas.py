"""JSON schemas as the common clients write them: plain, from Python classes with titles, or closed and strict.

Promises that a schema lists exactly the fields it is given, in their order.
Must not know what the fields mean, nor who asks with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Schema = dict[str, object]
STYLES = ["plain", "plain", "python", "python", "bare", "closed", "strict"]
DRAFT = "http://json-schema.org/draft-07/schema#"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One property: its schema without title or description, and whether it must be there."""

    name: str
    schema: Schema = field(default_factory=lambda: {"type": "string"})
    description: str = ""
    required: bool = True


def object_schema(style: str, title: str, fields: list[Field]) -> Schema:
    """The schema of an object with these fields, written in one of the `STYLES`."""
    properties: Schema = {f.name: _property(style, f) for f in fields}
    required = [f.name for f in fields if f.required or style == "strict"]
    if style in ("python", "bare"):
        schema: Schema = {"properties": properties}
        if required:
            schema["required"] = required
        if style == "python":
            schema["title"] = title
        return {**schema, "type": "object"}
    schema = {"type": "object", "properties": properties, "required": required}
    if style in ("closed", "strict"):
        schema["additionalProperties"] = False
    if style == "closed":
        schema["$schema"] = DRAFT
    return schema


def _property(style: str, item: Field) -> Schema:
    schema = _expanded(style, item.name, item.schema)
    nested = "properties" in schema
    if not item.required and (style == "strict" or (style in ("python", "bare") and "enum" not in schema)):
        schema = {"anyOf": [schema, {"type": "null"}]}
        if style != "strict":
            schema["default"] = None
    if style == "python" and not nested:
        schema = {"title": heading(item.name), **schema}
    if item.description:
        schema = {**schema, "description": item.description}
    return schema


def _expanded(style: str, name: str, schema: Schema) -> Schema:
    """The schema with "fields" (of a nested object, or of a list's items) written out in the style."""
    nested, items = schema.get("fields"), schema.get("items")
    if isinstance(nested, list):
        written = object_schema(style, heading(name), nested)
        written.pop("$schema", None)
        return written
    if isinstance(items, dict):
        return {**schema, "items": _expanded(style, name, items)}
    return dict(schema)


def heading(name: str) -> str:
    """A field's name as a title: "Full Name" for full_name or fullName."""
    return " ".join(word.capitalize() for word in re.findall(r"[A-Za-z][a-z]*|\d+", name))

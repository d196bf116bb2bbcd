"""Grammars made to take time or memory: each ends as a refusal or as a grammar that costs little."""

from __future__ import annotations

import json

from quire_server.text.grammar_check import Grammar


def _schema(schema: object) -> Grammar:
    return Grammar(rules=f"start: %json {json.dumps(schema)}")


def _doubled(levels: int, double) -> dict[str, object]:
    """Definitions, each of which has the one before twice."""
    definitions: dict[str, object] = {"d0": {"type": "object", "properties": {"x": {"type": "string"}}}}
    for i in range(1, levels):
        definitions[f"d{i}"] = double({"$ref": f"#/$defs/d{i - 1}"}, i)
    return {"$ref": f"#/$defs/d{levels - 1}", "$defs": definitions}


def _nested(levels: int) -> object:
    schema: object = {"type": "string"}
    for _ in range(levels):
        schema = {
            "anyOf": [{"properties": {"a": schema}, "type": "object"}, {"properties": {"b": schema}, "type": "object"}]
        }
    return schema


BOMBS: dict[str, Grammar] = {
    "nested_counts": Grammar(rules="start: /((a{1,1000}){1,1000})/"),
    "deeper_counts": Grammar(rules="start: /(((a{1,1000}){1,1000}){1,1000})/"),
    "counts_of_counts": Grammar(rules="start: /((((a{0,100}b){0,100}c){0,100}d){0,100})/"),
    "stars_of_stars": Grammar(rules="start: /((a*)*)*b/"),
    "many_alternatives": Grammar(rules=f"start: /{'|'.join(['a'] * 20_000)}/"),
    "catastrophic": Grammar(rules="start: /(.*a|.*b|.*c){1,50}x/"),
    "exponential_automaton": Grammar(rules="start: /(a|b)*a(a|b){20}/"),
    "classes": Grammar(rules="start: /\\p{L}{1,1000}\\p{N}{1,1000}/"),
    "complements": Grammar(
        rules="start: T\nT: " + " & ".join(f"~/(?s:.*){c}.{{{7 + i}}}(?s:.*)/" for i, c in enumerate("abcdefghijkl"))
    ),
    "enum": _schema({"enum": [f"v{i}" * 2 for i in range(5000)]}),
    "nested_any_of": _schema(_nested(10)),
    "any_of_of_references": _schema(
        _doubled(30, lambda ref, i: {"anyOf": [ref, {"type": "object", "properties": {"a": ref, "b": ref}}]})
    ),
    "all_of_of_references": _schema(_doubled(30, lambda ref, i: {"allOf": [ref, ref]})),
    "product_of_any_of": _schema(
        _doubled(12, lambda ref, i: {"allOf": [ref, {"anyOf": [{"properties": {f"y{i}{k}": {}}} for k in range(3)]}]})
    ),
    "itself": _schema({"$ref": "#"}),
    "two_of_each_other": _schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "itself_and_more": _schema({"allOf": [{"$ref": "#"}, {"type": "object"}]}),
    "counts_of_items": _schema({"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}),
    "length": _schema({"type": "string", "minLength": 10**6, "maxLength": 2 * 10**6}),
    "length_of_a_pattern": _schema({"type": "string", "pattern": "^(a|aa)+$", "minLength": 10**5}),
    "many_optional_properties": _schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    ),
    "rules_of_rules": Grammar(rules='start: a{1,100000}\na: b{1,100000}\nb: "x" | "y" c\nc: "z"{1,1000}'),
    "ambiguous": Grammar(rules='start: s\ns: s s | s s s | "a" | "aa" | "aaa" | "b"'),
    "endless_empty": Grammar(rules='start: a\na: a b | b\nb: "" | "x" b | a'),
    "right_recursive": Grammar(rules="start: a\na: /./ a | /./"),
    "brackets": Grammar(rules="start: @client", client="root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "long_class": Grammar(rules="start: @client", client="root ::= [" + "a" * 60_000 + "]+"),
    "quotes": Grammar(rules="start: @client", client="root ::= " + '"a" ' * 15_000 + '"'),
}

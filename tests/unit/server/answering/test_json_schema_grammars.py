"""Texts that a grammar of a JSON schema takes and refuses: orders, escapes, numbers, dates, names, and what is refused.

Every text is followed token by token through the masks.
"""

from __future__ import annotations

import json

import pytest

from quire_server.answering.constraining.calls import reading_format
from quire_server.answering.constraining.constraints import constraint
from quire_server.answering.constraining.json_schema import SchemaRefused, grammar
from quire_server.answering.constraining.json_schema.objects import MOST_UNORDERED
from quire_server.answering.constraining.schemas import parsed, reviewed
from quire_server.answering.options import GenerationOptions, PromptOptions, Structure, Tool, ToolOptions
from quire_server.errors import BadRequest
from quire_server.text.parsing.formats import TOOL_FORMATS
from support.grammars import SPELLED, verdict

INTEGER: dict[str, object] = {"type": "integer"}
STRING: dict[str, object] = {"type": "string"}
READ_FILE = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 12}, "offset": INTEGER, "limit": INTEGER},
    "required": ["path"],
}


def compiled(schema: dict[str, object]) -> str:
    return grammar(reviewed(parsed(json.dumps(schema))))


def check(schema: dict[str, object], whole: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    rules = compiled(schema)
    for text in whole:
        assert verdict(rules, text, SPELLED) == "whole", text
    for text in wrong:
        assert verdict(rules, text, SPELLED) != "whole", text


def refusal(schema: dict[str, object]) -> str:
    with pytest.raises(SchemaRefused) as refused:
        compiled(schema)
    return str(refused.value)


def quoted(*texts: str) -> tuple[str, ...]:
    return tuple(f'"{text}"' for text in texts)


def closed(names: int, required: tuple[str, ...] = ()) -> dict[str, object]:
    properties = {f"p{i}": INTEGER for i in range(names)}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "whole", "wrong"),
    [
        (
            READ_FILE,
            (
                '{"path": "a.txt", "limit": 9, "offset": 5}',
                '{"limit": 9, "path": "a.txt"}',
                '{"path": "", "pathway": [], "pa": {}, "limit": 1}',
            ),
            ("{}", '{"limit": 9}', '{"path": "a", "path": "b"}', '{"path": "a", "limit": "9"}', '{"x": 1, "path": ""}'),
        ),
        (closed(2), ("{}", '{"p1": 1, "p0": 2}'), ('{"p0": 1, }', '{"p2": 1}', '{"p0": 1, "p1": 2, "p0": 3}')),
        (
            closed(MOST_UNORDERED + 6, ("p0", "p69")),
            ('{"p9": 1, "p0": 1, "p69": 2, "p64": 0}',),
            ('{"p0": 1}', '{"p69": 2}', '{"p69": 1, "p0": 1}'),
        ),
        (
            {"type": "object", "properties": {f"p{i}": INTEGER for i in range(MOST_UNORDERED + 1)}},
            ('{"p64": 1, "q": 2}', '{"p3": 1, "p1": 1, "q": "x"}'),
            ('{"p64": 1, "p0": 2}', '{"p64": 1, "p3x": 2}', '{"q": 1, "p00": 1}'),
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 1, "maxProperties": 2},
            ('{"a": 1}', '{"b": 1, "z": 2}', '{"y": 1, "z": 2}'),
            ("{}", '{"a": 1, "b": 1, "c": 1}', '{"a": 1, "y": 1, "z": 2}'),
        ),
        (
            {**closed(3), "minProperties": 1, "maxProperties": 2},
            ('{"p0": 1}', '{"p2": 1, "p0": 2}'),
            ("{}", '{"p0": 1, "p1": 2, "p2": 3}', '{"p0": 1, "p1": 2, '),
        ),
        (
            {"const": {"a": 1, "b": ["x"]}},
            ('{"b": ["x"], "a": 1}',),
            ('{"a": 1}', '{"a": 1, "b": ["x"], "c": 0}', '{"a": 1, "b": []}'),
        ),
    ],
    ids=["some required", "closed", "groups", "groups and others", "counted", "closed and counted", "constant"],
)
def test_members_in_any_order(schema: dict[str, object], whole: tuple[str, ...], wrong: tuple[str, ...]):
    check(schema, whole, wrong)


def test_what_is_begun_can_be_ended():
    """No comma where no member may follow, and no name of which nothing is left."""
    rules = compiled({**closed(1), "required": ["p0"]})
    assert verdict(rules, '{"p0": 1,', SPELLED) == ","
    assert verdict(compiled(closed(1)), '{"p0": 1, "', SPELLED) == ', "'


@pytest.mark.parametrize(
    ("schema", "whole", "wrong"),
    [
        (
            STRING,
            quoted(r"caf\u00e9", r"\u003cb\u003E", r"\/\b\f\n\r\t\"\\", r"\u65e5\u672C", r"\ud83d\uDE00", "\x7f"),
            (r'"\ud83d"', r'"\ude00"', r'"\ud83d\u0041"', r'"\x41"', '"\n"', r'"\u00e"'),
        ),
        (
            {"maxLength": 2, **STRING},
            quoted(r"\u00e9\ud83d\ude00", "éé", r"\\\""),
            quoted(r"\u00e9\u00e9\u00e9", "abc"),
        ),
        ({"minLength": 2, **STRING}, quoted(r"\u00e9a"), quoted(r"\ud83d\ude00", "é")),
        (
            {"pattern": "^[a-z]{2}é.$", **STRING},
            quoted("abéx", r"a\u0062\u00E9x", r"abé\ud83d\ude00"),
            quoted("abex", r"ab\u00e8x", r"abé\n", "xabéx"),
        ),
        ({"pattern": r"^a|b$|\d/", **STRING}, quoted("ax", "xb", "x1/y", r"1\/"), quoted("ba", "1", "١/")),
        ({"pattern": r"^[^\s\"]+$", **STRING}, quoted("a", r"\\", r"\u00e9"), quoted("", r"\"", r"\u0020", r"\u2003")),
        (
            {"pattern": "^(?i)é[k-m]$", **STRING},
            quoted("ÉL", r"\u00c9m"),
            quoted(
                "EL",
            ),
        ),
        ({"enum": ["café", "a/b", "<b>"]}, quoted(r"caf\u00e9", "café", r"a\/b", r"\u003cb\u003E"), quoted("cafe")),
        (
            {"type": "object", "properties": {"né": INTEGER}, "additionalProperties": STRING},
            (r'{"n\u00e9": 1}', '{"né": 1}', '{"n": "x"}', r'{"\u006e": "x"}'),
            (r'{"n\u00E9": "x"}', r'{"\u006e\u00e9": "x"}'),
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"const": "x"}},
                "required": ["a"],
                "additionalProperties": {"type": "integer", "minimum": 5, "maximum": 5},
            },
            ('{"a": "x", "ab": 5}', r'{"a": "x", "\u0061b": 5}'),
            (r'{"a": "x", "\u0061": 5}', '{"a": "x", "a": 5}', r'{"a": "x", "\u0041": 6}'),
        ),
        ({"type": "object"}, (r'{"\u00e9": "\ud83d\ude00"}', r'{"\/": {"a": []}}'), (r'{"\ud83d": 1}',)),
    ],
)
def test_escapes(schema: dict[str, object], whole: tuple[str, ...], wrong: tuple[str, ...]):
    check(schema, whole, wrong)


@pytest.mark.parametrize(
    ("schema", "whole", "wrong"),
    [
        (
            {"const": 2**53 + 1},
            ("9007199254740993",),
            ("9007199254740992", "9007199254740993.0", "9.007199254740993e15"),
        ),
        (
            {"type": "integer", "enum": [1234567890123456789, 1234567890123456790]},
            ("1234567890123456789", "1234567890123456790"),
            ("1234567890123456768",),
        ),
        (
            {"type": "integer", "minimum": 2**63, "maximum": 2**64 - 1},
            ("9223372036854775808", "18446744073709551615"),
            ("9223372036854775807", "18446744073709551616", "1e19"),
        ),
        (INTEGER, ("0", "-7", "1e2", "1E+2", "100.0", "-0"), ("1.5", "1e-2", "01", "+1", "1e19", "1.")),
        (
            {"type": "integer", "minimum": 3, "exclusiveMaximum": 1201},
            ("3", "100", "1e2", "1200", "12e2", "12.0", "3.0e1"),
            ("2", "1201", "13e2", "0", "-5", "1e4", "2.9"),
        ),
        (
            {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
            ("-1.5", "-1", "0", "1.99", "1e0", "19e-1", "-15E-1", "-0.0"),
            ("-1.51", "2", "2.0", "20e-1", "3", "1e1", "-16e-1"),
        ),
        ({"exclusiveMinimum": 0, "type": "number"}, ("0.001", "1", "1e-3"), ("0", "0.0", "-1", "0e5")),
        ({"type": "number", "multipleOf": 0.01}, ("1.25", "1", "-1.250"), ("1.255",)),
        ({"type": "integer", "multipleOf": 7}, ("14", "0", "-7"), ("15",)),
        ({"enum": [0.5, 1e-7, 100]}, ("0.5", "0.50", "5e-1", "1e-07", "1e2", "100.0"), ("0.51", "1e-6", "10")),
        ({**INTEGER, "$schema": "http://json-schema.org/draft-04/schema#"}, ("100",), ("1e2", "100.0")),
        ({"type": "number", "$ref": "#/$defs/p", "$defs": {"p": {"minimum": 3}}, "maximum": 5}, ("4.5",), ("2", "6")),
    ],
)
def test_numbers(schema: dict[str, object], whole: tuple[str, ...], wrong: tuple[str, ...]):
    check(schema, whole, wrong)


@pytest.mark.parametrize(
    ("name", "whole", "wrong"),
    [
        ("date", ("2024-02-29", "2000-02-29", "2023-02-28"), ("2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01")),
        ("date-time", ("2024-02-29T03:04:05Z", "2023-01-02t23:59:60.5+00:00"), ("2023-02-29T00:00:00Z",)),
        ("time", ("12:00:00+01:00", "00:00:00z"), ("12:00:00", "24:00:00Z", "12:00:60Z")),
        ("duration", ("P1Y2M", "PT5S", "P3W", "P1DT1H"), ("P", "PT", "P1W1D", "P1S")),
        ("email", ("a.b+c@d.example",), ("a@", "@b", "a b@c")),
        ("hostname", ("a-b.example",), ("-a", "a" * 64, ".".join(["a" * 60] * 5))),
        ("ipv4", ("1.2.3.255",), ("1.2.3.256", "01.2.3.4")),
        (
            "ipv6",
            ("::", "::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1::8"),
            ("1:2:3", "1::2::3"),
        ),
        ("uuid", ("123e4567-e89b-12d3-a456-426614174000",), ("123e4567",)),
        ("uri", ("http://a.example/c?d#e", "mailto:x@y", "http://[::1]:80/", r"http:\/\/a"), ("a b", "//x", "a:<b>")),
    ],
)
def test_formats(name: str, whole: tuple[str, ...], wrong: tuple[str, ...]):
    check({"type": "string", "format": name}, quoted(*whole), quoted(*wrong))


NAMED = {
    "type": "object",
    "properties": {"a_x": {"type": "string"}},
    "patternProperties": {"^a_": {"maxLength": 2}, "_n$": {"type": "integer"}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "whole", "wrong"),
    [
        (
            NAMED,
            ('{"a_x": "ab", "a_y": 123}', '{"b_n": 5, "a_n": 6}', r'{"\u0061_y": "ab"}'),
            ('{"a_x": "abc"}', '{"b": 1}', '{"a_x": 1}', '{"a_n": "x"}', r'{"\u0061_y": "abc"}'),
        ),
        (
            {"allOf": [{"properties": {"k": {"minLength": 2}}}, {"properties": {"k": STRING}, "required": ["k"]}]},
            ('{"k": "ab"}', "1"),
            ('{"k": "a"}', '{"k": 1}', "{}"),
        ),
        (
            {
                "oneOf": [
                    {"properties": {"t": {"const": "x"}}, "required": ["t"]},
                    {"properties": {"t": {"const": "y"}}},
                ]
            },
            ('{"t": "x"}', '{"t": "y"}', "{}"),
            ('{"t": "z"}', "1"),
        ),
        (
            {"enum": ["a", 1, None, [1], "abc"], "type": ["string", "array"], "maxLength": 2},
            ('"a"', "[1]"),
            ("1", "null", '"abc"'),
        ),
        (
            {"$ref": "#node", "$defs": {"n": {"$anchor": "node", "items": {"$ref": "#node"}, "type": "array"}}},
            ("[[], [[]]]",),
            ("[1]", "{}"),
        ),
        (
            {"prefixItems": [INTEGER, STRING], "items": False, "minItems": 1, "type": "array"},
            ("[1]", '[1, "a"]'),
            ("[]",),
        ),
    ],
)
def test_joined_schemas(schema: dict[str, object], whole: tuple[str, ...], wrong: tuple[str, ...]):
    check(schema, whole, wrong)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "'pattern' '(?=a)' at #/properties/a: look-around"),
        ({"items": {"pattern": r"\bx"}}, r"'pattern' '\\bx' at #/items: word boundaries"),
        (
            {"properties": {"a": {"const": 0.12345678901234567}}},
            "'const' at #/properties/a has a number",
        ),
        ({"items": {"multipleOf": 3, "minimum": 10**20}}, "'minimum' beside 'multipleOf' at #/items"),
        ({"oneOf": [STRING, {"minLength": 2}]}, "'oneOf' at # is not supported"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, STRING]}}, "$ref": "#/$defs/a"}, "leads back to itself"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"]}, ""),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "no value fulfils the schema at #"),
        ({"items": {"type": "text"}}, "'type' at #/items: Invalid type: text"),
        ({"patternProperties": {str(i): {} for i in range(5)}, "type": "object"}, "'patternProperties' at # has 5"),
        ({"maxProperties": 40, "properties": {"a": {}}, "type": "object"}, "'maxProperties' at # is not supported"),
        (
            {"allOf": [{"anyOf": [{"required": [f"{i}{k}"]} for k in range(12)]} for i in range(3)]},
            "the value at # has",
        ),
    ],
)
def test_refusals_name_keyword_and_place(schema: dict[str, object], said: str):
    if said:
        assert said in refusal(schema)
    else:  # what no object can fulfil leaves the other kinds of values
        check(schema, ("1",), ("{}", '{"a": 1}'))


@pytest.mark.parametrize("choice", ["required", "function", "auto"])
def test_tools_take_their_arguments_in_any_order(choice: str):
    tool = Tool(name="read_file", parameters=READ_FILE, strict=choice == "auto")
    options = GenerationOptions(
        prompt=PromptOptions(source=["x"], param="prompt"),
        tools=ToolOptions(tools=(tool,), choice=choice, function="read_file", parallel=False),
    )
    form = reading_format(options.tools, TOOL_FORMATS["hermes"])
    found = constraint(options, tool_format=form, thinking=None, token_id=SPELLED.token_id)
    assert found is not None
    for arguments in ('{"path": "a", "limit": 9, "offset": 5}', r'{"offset": 1e1, "path": "\u00e9"}'):
        call = f'<tool_call>\n{{"name": "read_file", "arguments": {arguments}}}\n</tool_call>'
        assert verdict(found.grammar.rules, call, SPELLED) == "whole"


def test_a_tool_is_refused_with_the_place():
    tool = Tool(name="f", parameters={"type": "object", "properties": {"a": {"pattern": "(?!a)"}}}, strict=True)
    options = GenerationOptions(
        prompt=PromptOptions(source=["x"], param="prompt"), tools=ToolOptions(tools=(tool,), choice="required")
    )
    with pytest.raises(BadRequest, match=r"'f' cannot be enforced: 'pattern' .* at #/properties/a: look-around"):
        constraint(options, tool_format=TOOL_FORMATS["hermes"], thinking=None, token_id=SPELLED.token_id)


def test_any_object_takes_every_escape():
    options = GenerationOptions(
        prompt=PromptOptions(source=["x"], param="prompt"), structure=Structure(kind="json_object")
    )
    found = constraint(options, tool_format=None, thinking=None, token_id=SPELLED.token_id)
    assert found is not None
    assert verdict(found.grammar.rules, r'{"a": "caf\u00e9"}', SPELLED) == "whole"
    assert verdict(found.grammar.rules, r'{"a": "\ud800"}', SPELLED) != "whole"


def test_128_tools_of_20_properties_are_taken():
    names = [
        f"{verb}_{noun}" for verb in ("get", "set", "list", "find") for noun in ("id", "path", "kind", "time", "size")
    ]
    parameters = {"type": "object", "properties": dict.fromkeys(names, STRING), "required": names[:3]}
    tools = tuple(Tool(name=f"tool_{i}", parameters=parameters) for i in range(128))
    options = GenerationOptions(
        prompt=PromptOptions(source=["x"], param="prompt"), tools=ToolOptions(tools=tools, choice="required")
    )
    found = constraint(options, tool_format=TOOL_FORMATS["hermes"], thinking=None, token_id=SPELLED.token_id)
    assert found is not None
    arguments = json.dumps({name: name for name in reversed(names)})
    call = f'<tool_call>\n{{"name": "tool_127", "arguments": {arguments}}}\n</tool_call>'
    assert verdict(found.grammar.rules, call, SPELLED) == "whole"

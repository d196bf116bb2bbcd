"""Calls between tags, as Qwen3-Coder models write them: what they become by the schemas of their tools."""

from __future__ import annotations

import json

import pytest

from support.parsed import check_cuts, parse

NOON = ("get_time", "{}")

XML = """<tool_call>
<function=get_weather>
<parameter=city>
Pa"ris
</param> é\\

</parameter>
<parameter=days>
3
</parameter>
<parameter=exact>
True
</parameter>
<parameter=place>
{"x": [1.5, "</function>"]}
</parameter>
<parameter=other>
[1]
</parameter>
</function>
</tool_call>"""


def test_values_between_tags_become_json_by_their_schema() -> None:
    whole = parse([f"Now.\n{XML}\n{XML}"], "qwen3_coder")
    assert whole.content == "Now.\n"
    assert [name for name, _ in whole.calls] == ["get_weather"] * 2
    for _, arguments in whole.calls:
        assert json.loads(arguments) == {
            "city": 'Pa"ris\n</param> é\\\n',
            "days": 3,
            "exact": True,
            "place": {"x": [1.5, "</function>"]},
            "other": [1],
        }
    check_cuts("qwen3_coder", f"Now.\n{XML}\n{XML}", whole)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": "string"}, "", ""),
        ({"type": "integer"}, "3", 3),
        ({"type": "integer"}, "three", "three"),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": 1}, "1", 1),
        ({}, "1", 1),
        ({}, "NaN", "NaN"),
        ({"type": 5, "anyOf": 7, "enum": 1}, "word", "word"),
    ],
)
def test_the_kind_of_a_value(schema: dict[str, object], text: str, value: object) -> None:
    tools = {"f": {"properties": {"a": schema}}}
    written = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    ((_, arguments),) = parse([written], "qwen3_coder", tools=tools).calls
    assert json.loads(arguments) == {"a": value}
    assert type(json.loads(arguments)["a"]) is type(value)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<function=get_time></function> so", " so", (NOON,)),
        ("<tool_call>\n<function=get_time>\n</tool_call>", "", (NOON,)),
        ("<tool_call> nothing </tool_call>", "<tool_call> nothing </tool_call>", ()),
        ("<tool_call>\n<function=get_ti", "<tool_call>\n<function=get_ti", ()),
        ("<function=get_weather><parameter=city>Par", "", (("get_weather", '{"city": "Par'),)),
        ("<function=get_weather><parameter=days>1", "", (("get_weather", '{"days": '),)),
    ],
)
def test_tags_that_are_missing(text: str, content: str, calls: tuple[tuple[str, str], ...]) -> None:
    whole = parse([text], "qwen3_coder")
    assert (whole.content, whole.calls) == (content, calls)
    check_cuts("qwen3_coder", text, whole)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
    ],
)
@pytest.mark.parametrize("value", ["use {} tag", "{}", "{}{}", "a\n{}\nb", "{} <parameter", "[1, {}"])
@pytest.mark.parametrize("kind", ["string", "array"])
def test_the_end_tag_within_a_value_is_text(form: str, text: str, value: str, kind: str) -> None:
    value = value.replace("{}", "</parameter>" if form == "qwen3_coder" else "</arg_value>")
    text = text.replace("{}", value)
    whole = parse([text], form, tools={"f": {"properties": {"x": {"type": kind}}}})
    ((name, arguments),) = whole.calls
    assert (name, json.loads(arguments), whole.content, whole.error) == ("f", {"x": value}, "", None)
    assert parse(list(text), form, tools={"f": {"properties": {"x": {"type": kind}}}}) == whole


def test_a_value_that_is_cut_off_after_its_end_tag_is_whole() -> None:
    for rest in ("", "\n", "\n</fun"):
        text = f"<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>{rest}"
        assert parse(list(text), "qwen3_coder").calls == (("f", '{"x": 3'),)

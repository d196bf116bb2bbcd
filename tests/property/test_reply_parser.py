"""Streamed replies against whole ones: any text, cut anywhere, in every format; and what is written is read back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from quire_server.text.parsing import harmony
from quire_server.text.parsing.formats import TOOL_FORMATS, tool_format
from quire_server.text.parsing.reasoning import ThinkingMarks
from support.parsed import Parsed, cut, parse, written

TEXTS_PER_FORMAT = 66  # each at four cuts; `make property-test` reads many times as many
FORMATS = sorted({form.name for form in TOOL_FORMATS.values()})
THOUGHTS = ThinkingMarks(start="<think>", end="</think>")
thorough = settings(max_examples=14, deadline=None, suppress_health_check=[HealthCheck.too_slow])

CALLS = [
    '{"name": "get_weather", "arguments": {"city": "P\\"ar}is", "x": [1, {"a": "\\u00e9\\\\"}]}}',
    '{"parameters": {"city": "</tool_call>[TOOL_CALLS]"}, "name": "get_weather"}',
    '{"name": "get_time", "arguments": "{\\"a\\": 1}"}',
    '{"type": "function", "name": "get_time"}',
    '{"name": "get_time", "parameters": {"a": [tru}',
    '{"name": "get_time", "parameters": null}',
    "<function=get_weather>\n<parameter=city>\nuse </parameter> tag\n</parameter>\n</function>",
    "get_weather\n<arg_key>city</arg_key>\n<arg_value>use </arg_value> tag</arg_value>",
    '<function=get_weather>\n<parameter=city>\nPar"is\n\n</parameter>\n<parameter=days>3</parameter>\n</function>',
    'get_weather[ARGS]{"city": "Paris"}',
    'get_time[CALL_ID]abc{"a": 1}',
    '<invoke name="get_weather">\n<parameter name="city">Par\nis</parameter>\n</invoke>',
    '<｜DSML｜invoke name="get_weather"><｜DSML｜parameter name="city" string="true">a"b</｜DSML｜parameter>'
    '<｜DSML｜parameter name="days" string="false">[3]</｜DSML｜parameter></｜DSML｜invoke>',
    "get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>",
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>',
    '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>',
    '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>',
    "[get_weather(city='P\\x61ris', days=[1, (2.5, None)], place={'x': True}), get_time()]",
    'get_weather(city="Par\\"is")\nget_time()',
    'call:get_weather{city:<|"|>Par"is<|"|>,days:3,place:{x:[<|"|>a<|"|>,true]}}',
    "call:get_weather{city:<escape>Paris<escape>}",
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
    "<|start|>assistant to=functions.get_time<|channel|>commentary<|message|>{}<|end|>",
    "<|channel|>analysis<|message|>Hm.<|end|>",
    "<|channel|>final<|message|>So.<|return|>",
]
OPENERS = ["<tool_call>\n", "<|python_tag|>", "[TOOL_CALLS]", "\n", ""]
MARKERS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "<parameter=", "</parameter>"]
MARKERS += [
    "[ARGS]",
    "[CALL_ID]",
    "</function>",
    "<think>",
    "</think>",
    "[",
    "]",
    "{",
    "}",
    ";",
    ",",
    ":",
    '"',
    "\\",
    "<",
    ">",
]
MARKERS += sorted({marker for form in TOOL_FORMATS.values() for marker in form.markers} - set(MARKERS))
OTHERS = [
    "\n",
    " ",
    "\n\n",
    '"name"',
    '"arguments"',
    '"get_time"',
    "get_time",
    "null",
    "12",
    "é",
    "\U0001f600",
    "x < y",
]


@cache
def own_calls(form: str) -> list[str]:
    """Calls in this format, between its outer marks where it has any."""
    marks = tool_format(form).markers[:2]
    outer = [("", ""), ("\n", "\n"), *([(marks[0], marks[1])] if len(marks) == 2 else [(mark, "") for mark in marks])]
    texts = [f"{opener}{call}{closer}" for call in CALLS for opener, closer in outer]
    return [text for text in texts if parse([text], form).calls]


def random_text(rng: random.Random, form: str) -> str:
    """Calls, parts of calls and text between them; some are in this format."""
    fragments = []
    for _ in range(rng.randint(1, 8)):
        kind = rng.random()
        fragment = rng.choice(CALLS if kind < 0.5 else MARKERS if kind < 0.8 else OTHERS)
        if kind < 0.3:
            fragment = f"{rng.choice(OPENERS)}{fragment}\n</tool_call>"
        elif kind < 0.5:
            fragment = rng.choice(own_calls(form))
        fragments.append(fragment[: rng.randint(0, len(fragment))] if rng.random() < 0.2 else fragment)
    return "".join(fragments)


@pytest.mark.parametrize("form", sorted({form.read: form.name for form in TOOL_FORMATS.values()}.values()))
def test_any_cut_gives_the_reply_of_the_whole_text(form: str, request: pytest.FixtureRequest) -> None:
    num_calls, num_texts = 0, TEXTS_PER_FORMAT * int(request.config.getoption("--times", 1))
    is_whole = tool_format(form).reads_thoughts  # its marks are no content
    for number in range(num_texts):
        rng = random.Random(f"{form} {number}")
        text = random_text(rng, form)
        marks, is_open, parallel = rng.choice([None, THOUGHTS]), rng.random() < 0.3, rng.random() < 0.7

        def read(
            pieces: list[str],
            marks: ThinkingMarks | None = marks,
            is_open: bool = is_open,
            parallel: bool = parallel,
        ) -> Parsed:
            return parse(pieces, form, marks=marks, is_open=is_open, parallel=parallel).without_count()

        whole = read([text])
        assert read(list(text)) == whole, text
        for _ in range(3):
            pieces = cut(text, [rng.randrange(400) for _ in range(rng.randint(1, 12))])
            assert read(pieces) == whole, pieces
        assert parallel or len(whole.calls) <= 1
        num_calls += len(whole.calls)
        # Nothing gets lost: without calls and thoughts the text is the content, to the last character.
        assert whole.calls or marks is not None or is_whole or whole.content == text, text
    assert num_calls > num_texts / 10, "the texts hardly have calls"


places = st.lists(st.integers(0, 400), max_size=12)
names = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(max_size=8) | st.just("name"), values, max_size=4)


@pytest.mark.parametrize("form", [form for form in FORMATS if tool_format(form).writes_json])
@thorough
@given(
    calls=st.lists(st.tuples(names, objects), min_size=1, max_size=4),
    style=st.sampled_from([{}, {"indent": 1}, {"ensure_ascii": False}, {"separators": (",", ":")}]),
    thought=st.sampled_from(["", "<think>\nHm.\n</think>\n\n"]),
    places=places,
)
def test_what_is_written_is_read_back(
    form: str,
    calls: list[tuple[str, Mapping[str, object]]],
    style: Mapping[str, Any],
    thought: str,
    places: list[int],
) -> None:
    called = [(name, json.dumps(arguments, **style)) for name, arguments in calls]
    thought = thought and f"{harmony.THOUGHTS}Hm.{harmony.END_OF_THOUGHTS}" if form == "openai" else thought
    text = thought + written(tool_format(form), called)
    parsed = parse(cut(text, places), form, tools=dict.fromkeys(name for name, _ in calls), marks=THOUGHTS)
    assert parsed.calls == tuple(called)
    assert (parsed.content, parsed.reasoning, parsed.error) == ("", "Hm." if thought else "", None)


@pytest.mark.parametrize("form", [form for form in FORMATS if tool_format(form).parameters is not None])
@thorough
@given(name=names, values=st.dictionaries(names, st.text(), max_size=4), places=places)
@example(name="f", values={"a": "\n\n", "b": "", "c": '\\"\x00'}, places=[])
def test_texts_of_single_arguments_are_read_back(
    form: str, name: str, values: dict[str, str], places: list[int]
) -> None:
    check_single_arguments(form, name, values, places)


@pytest.mark.parametrize("form", [form for form in FORMATS if (style := tool_format(form).parameters) and style.after])
@thorough
@given(data=st.data(), places=places)
def test_values_keep_tags_that_do_not_end_them(form: str, data: st.DataObject, places: list[int]) -> None:
    """A value is any text, without the tag that ends it before one that may follow it."""
    style, markers = tool_format(form).parameters, tool_format(form).markers
    assert style is not None
    end, after = style.after.strip(), re.compile(rf"\s*({re.escape(style.before)}|{end_of_call(form)}|$)")
    fragments = st.sampled_from([end, style.after, style.before, "\n", " ", "a", "<", "</", *markers])
    value = st.lists(fragments, max_size=8).map("".join)
    is_value = value.filter(
        lambda text: not any(after.match(text, at.end()) for at in re.finditer(re.escape(end), text))
    )
    check_single_arguments(form, "f", data.draw(st.dictionaries(names, is_value, max_size=3)), places)


def end_of_call(form: str) -> str:
    """A pattern of the tags that may follow a call's last argument."""
    own = tool_format(form)
    return "|".join(re.escape(tag.strip()) for tag in (own.after_call, own.end, own.markers[1]) if tag.strip())


def check_single_arguments(form: str, name: str, values: Mapping[str, str], places: list[int]) -> None:
    """A call with these arguments, written in the format, is read back from any pieces."""
    tools = {name: {"properties": {key: {"type": "string"} for key in values}}}
    text = written(tool_format(form), [(name, json.dumps(values))])
    parsed = parse(cut(text, places), form, tools=tools)
    ((called, arguments),) = parsed.calls
    assert (called, json.loads(arguments), parsed.content) == (name, values, "")

"""Calls as single families of models write them: what is a call, what is content, at every cut."""

from __future__ import annotations

import json

import pytest

from quire_server.text.parsing.formats import TOOL_FORMATS, model_formats
from quire_server.text.parsing.reasoning import ThinkingMarks, reasoning_format
from support.fake_tokenizer import load_tokenizer
from support.parsed import Parsed, check_cuts, cut, parse

PARIS = ("get_weather", {"city": "Paris"})
NOON = ("get_time", {})
HARD = {"city": "\"}]'\\\n<x>é", "place": {"x": [1, {"é": "}"}], "y": None}, "exact": True}
HARD_JSON = json.dumps(HARD)

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>".format
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>".format
KIMI = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>".format
DSML = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'.format

# Format, text, content, calls; and whether a call could not be read.
CASES = [
    ("deepseek_v3", f"So.\n{CALLS}{V3('get_weather', HARD_JSON)}\n{V3('get_time', '{}')}{END_CALLS}", "So.\n",
     [("get_weather", HARD), NOON], False),
    ("deepseek_v31", f"{CALLS}{V31('get_weather', HARD_JSON)}{V31('get_time', '{}')}{END_CALLS}", "",
     [("get_weather", HARD), NOON], False),
    ("deepseek_v31", V31("get_time", "{}"), "", [NOON], False),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>none", "<｜tool▁calls▁begin｜>none", [], True),
    ("kimi_k2", "Ok <|tool_calls_section_begin|>" + KIMI("get_weather:0", HARD_JSON) + KIMI("get_time:1", "{}")
     + "<|tool_calls_section_end|>", "Ok ", [("get_weather", HARD), NOON], False),
    ("kimi_k2", "<|tool_call_begin|>get_time<|tool_call_argument_begin|>{}", "", [NOON], False),
    ("kimi_k2", "<|tool_calls_section_begin|> <|tool_call_begin|>", "<|tool_calls_section_begin|> <|tool_call_begin|>",
     [], True),
    ("granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time"}]', "",
     [PARIS, NOON], False),
    ("granite", '<tool_call>[{"name": "get_time", "arguments": {}}] ok', " ok", [NOON], False),
    ("granite-20b-fc", '<function_call> {"name": "get_time", "arguments": {}}<function_call> {"name": "get_time"}', "",
     [NOON, NOON], False),
    ("minimax", '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
     '{"name": "get_time"}\n</tool_calls>!', "!", [PARIS, NOON], False),
    ("jamba", '<tool_calls>[\n{"name": "get_time", "arguments": {}}\n]</tool_calls>', "", [NOON], False),
    ("glm45", "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get_time\n</tool_call>",
     "I look.\n", [("get_weather", {"city": "Paris", "days": 3}), NOON], False),
    ("glm45", '<tool_call>get_weather<arg_key>city</arg_key><arg_value>{"a"}\n</arg_value></tool_call>', "",
     [("get_weather", {"city": '{"a"}\n'})], False),
    ("glm45", "<tool_call>hello there", "<tool_call>hello there", [], True),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n'
     '<parameter name="city">Paris</parameter>\n'
     '<parameter name="place">{"x": 1}</parameter>\n</invoke>\n'
     '<invoke name="get_time">\n</invoke>\n</minimax:tool_call>', "",
     [("get_weather", {"city": "Paris", "place": {"x": 1}}), NOON], False),
    ("seed_oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n"
     "</seed:tool_call>", "", [PARIS], False),
    ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n' + DSML("city", "true", "3\n")
     + DSML("days", "false", "3") + "</｜DSML｜invoke>\n</｜DSML｜function_calls>", "",
     [("get_weather", {"city": "3\n", "days": 3})], False),
    ("deepseek_v4", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_time">\n'
     '</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "",
     [NOON], False),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>a, {b}: "c"\n<|"|>,'
     'days:-3,exact:true,place:{x:[<|"|>y<|"|>,null],<|"|>'
     'z z<|"|>:0.5}}<tool_call|><|tool_call>call:get_time{}<tool_call|>', "",
     [("get_weather", {"city": 'a, {b}: "c"\n', "days": -3, "exact": True, "place": {"x": ["y", None], "z z": 0.5}}),
      NOON], False),
    ("gemma4", "<|tool_call>call:get_weather{city:New York}<tool_call|>.", ".", [("get_weather", {"city": "New York"})],
     False),
    ("gemma4", "<|tool_call>get_time{}", "<|tool_call>get_time{}", [], True),
    ("functiongemma", "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>", "",
     [PARIS], False),
    ("pythonic", "[get_weather(city='Paris'), get_time()]", "", [PARIS, NOON], False),
    ("pythonic", "<|python_start|>[get_time()]<|python_end|>", "", [NOON], False),
    ("pythonic", 'I look:\n[get_weather(city="P\\x61\\u0072is", days=[1, 0x10, -2.5,], place={"x": (True, None)},)]\n',
     "I look:\n", [("get_weather", {"city": "Paris", "days": [1, 16, -2.5], "place": {"x": [True, None]}})], False),
    ("pythonic", """[get_weather(city='it\\'s "so"\\n', exact=true, days=null)]""", "",
     [("get_weather", {"city": 'it\'s "so"\n', "exact": True, "days": None})], False),
    ("pythonic", "[1, 2] and [unheard_of()]", "[1, 2] and [unheard_of()]", [], False),
    ("pythonic", "Use [get_time()] there.", "Use [get_time()] there.", [], False),
    ("pythonic", "<|python_start|>print(1)<|python_end|>", "<|python_start|>print(1)<|python_end|>", [], False),
    ("olmo3", "Well.\n<function_calls>\nget_weather(city='Paris')\nget_time()\n</function_calls>", "Well.\n",
     [PARIS, NOON], False),
    ("olmo3", "<function_calls></function_calls>", "<function_calls></function_calls>", [], True),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls", "fails"), CASES)
def test_content_and_calls(
    form: str, text: str, content: str, calls: list[tuple[str, dict[str, object]]], fails: bool
) -> None:
    whole = parse([text], form)
    found = [(name, json.loads(arguments)) for name, arguments in whole.calls]
    assert (whole.content, found, whole.error is not None) == (content, calls, fails)
    check_cuts(form, text, whole)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("pythonic", "[get_weather('Paris')]"),
        ("pythonic", "[get_weather(city='Par"),
        ("pythonic", "[get_weather(city={1, 2})]"),
        ("olmo3", "<function_calls>get_weather(city=</function_calls>"),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Par'),
        ("gemma4", "<|tool_call>call:get_weather{city:[}<tool_call|>"),
        ("deepseek_v31", '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Par'),
        ("openai", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Par'),
    ],
)
def test_a_call_that_is_not_complete_is_shown_and_reported(form: str, text: str) -> None:
    whole = parse([text], form)
    assert [name for name, _ in whole.calls] == ["get_weather"]
    assert whole.error is not None
    check_cuts(form, text, whole)


def test_the_ids_of_kimi_are_the_models_own() -> None:
    text = KIMI("get_time:3", "{}") + KIMI("get_time:3", "{}") + KIMI("get_time:4", "{}")
    assert parse([text], "kimi_k2").ids == ("functions.get_time:3", "call_0", "functions.get_time:4")


CHANNELS = reasoning_format("openai_gptoss").marks(lambda text: None)
THOUGHT = "<|channel|>analysis<|message|>Hm.\n<|end|>"
NEXT = "<|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
FINAL = "<|channel|>final<|message|>It is 4.<|return|>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (f"{THOUGHT}{NEXT}{FINAL}", "Hm.\n", "It is 4.", 0),
        (FINAL.removesuffix("<|return|>"), "", "It is 4.", 0),
        (f"{THOUGHT}{NEXT}{CALL}", "Hm.\n", "", 1),
        (f"{THOUGHT}{NEXT}{CALL}{NEXT}{CALL}", "Hm.\n", "", 2),
        (f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}", "Hm.\n", "I look.", 1),
        (f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}", "Hm.\n\nHm.\n", "It is 4.", 0),
        (' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>', "", "", 1),
        (f'{THOUGHT}{NEXT} to=functions.get_weather<|channel|>commentary json<|message|>{{"city": "Paris"}}', "Hm.\n",
         "", 1),
        ('<|channel|>commentary to=get_weather<|message|>{"city": "Paris"}', "", "", 1),
        ("<|channel|>analysis to=python<|message|>print(1)<|call|>", "print(1)", "", 0),
        ("Just text.\n", "", "Just text.\n", 0),
        ("to=day", "", "to=day", 0),
        (" \n", "", " \n", 0),
        ("<|channel|>ana", "", "", 0),
    ],
)  # fmt: skip
def test_messages_in_channels(text: str, reasoning: str, content: str, calls: int) -> None:
    for marks in (CHANNELS, None):
        whole = parse([text], "openai", marks=marks)
        assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == [PARIS] * calls
        if marks is not None:
            assert (whole.reasoning, whole.content) == (reasoning, content)
        for pieces in (list(text), *(cut(text, [place]) for place in range(1, len(text)))):
            assert parse(pieces, "openai", marks=marks).without_count() == whole.without_count()
    assert not parse([text], "openai", marks=CHANNELS, tools={}).calls


def test_tokens_of_thoughts_in_channels_are_counted() -> None:
    pieces = ["<|channel|>", "analysis", "<|message|>", "H", "m.", "<|end|>", NEXT, "<|channel|>final<|message|>", "4"]
    parsed = parse(pieces, "openai", marks=CHANNELS)
    assert parsed == Parsed(reasoning="Hm.", content="4", num_reasoning_tokens=2)


@pytest.mark.parametrize(
    ("calls", "reasoning", "template", "form", "marks"),
    [
        ("auto", "auto", "<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
        ("openai", "auto", "", "openai", "openai_gptoss"),
        ("auto", "openai_gptoss", "", "openai", "openai_gptoss"),
        ("openai", "none", "", "openai", None),
        ("auto", "auto", "{% if tools %}<|tool_call>call:{% endif %}<channel|>", "gemma4", "gemma4"),
        ("glm47", "glm47", "", "glm45", "qwen3"),
        ("deepseek_v31", "deepseek_v3", "", "deepseek_v31", "qwen3"),
        ("minimax_m2", "minimax_m2", "", "minimax_m2", "qwen3"),
        ("kimi_k2", "kimi_k2", "", "kimi_k2", "qwen3"),
        ("llama4_pythonic", "none", "", "pythonic", None),
        ("granite4", "granite", "", "hermes", "granite"),
    ],
)
def test_the_formats_of_a_model(calls: str, reasoning: str, template: str, form: str, marks: str | None) -> None:
    found = model_formats(calls, reasoning, load_tokenizer(), template)
    assert found.calls is TOOL_FORMATS[form]
    expected: ThinkingMarks | None = None
    if marks is not None:
        expected = reasoning_format(marks).marks(load_tokenizer().token_id)
    assert found.marks == expected

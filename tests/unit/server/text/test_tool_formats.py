"""The formats of calls by name and by a model's template, their ids, and that reading takes linear time."""

from __future__ import annotations

import re
import time

import pytest

from quire_engine.contract.errors import ConfigError
from quire_server.text.parsing.formats import TOOL_FORMATS, detect_tool_format, tool_format
from support.covering import few
from support.parsed import parse


def test_ids_are_unique_and_of_the_shape_that_clients_and_templates_expect() -> None:
    shapes = {name: form.new_id() for name, form in TOOL_FORMATS.items()}
    assert re.fullmatch(r"call_[0-9a-f]{24}", shapes["hermes"])
    assert re.fullmatch(r"[A-Za-z0-9]{9}", shapes["mistral"])
    assert len({TOOL_FORMATS["mistral"].new_id() for _ in range(100)}) == 100


def test_an_unknown_format_is_refused_with_all_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'xlam' is unknown; known are deepseek_v3, deepseek_v31,"):
        tool_format("xlam")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{...}</tool_call>", "hermes"),
        ("{% if tools %}<tool_call>\n<function=name>\n<parameter=a>", "qwen3_coder"),
        ('{% if tools %}{"name": function name, "parameters": dictionary}<|python_tag|><|eot_id|>', "llama3_json"),
        ("{% if tools %}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_args"),
        ("{% if tools %}{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{% if tools %}<tool_call>name<arg_key>", "glm45"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai"),
        ("{% if tools %}<minimax:tool_call><invoke name=", "minimax_m2"),
        ("{% if tools %}<seed:tool_call><function=", "seed_oss"),
        ("{% if tools %}<{{ '｜DSML｜' }}function_calls>", "deepseek_v32"),
        ("{% if tools %}<｜DSML｜tool_calls>", "deepseek_v4"),
        ("{% if tools %}<｜tool▁calls▁begin｜>{{ type }}<｜tool▁sep｜>{{ name }}\n```json", "deepseek_v3"),
        ("{% if tools %}<｜tool▁calls▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v31"),
        ("{% if tools %}<|tool_calls_section_begin|>", "kimi_k2"),
        ("{% if tools %}{{ '<|tool_call>call:' + name }}", "gemma4"),
        ("{% if tools %}<start_function_call>call:", "functiongemma"),
        ("{% if tools %}<function_calls>\nf(a=1)", "olmo3"),
        ('{% if tools %}<tool_calls>\n{"name": ', "minimax"),
        ('{% if tools %}<tool_calls>[{"name": ', "jamba"),
        ("{% if tools %}respond only with <|tool_call|> followed by a JSON list", "granite"),
        ("{% if tools %}output <function_call> {...}", "granite-20b-fc"),
        ("{% if tools %}[func_name1(params_name1=params_value1)]", "pythonic"),
        ('{% if tools %}{"name": function name, "parameters": dictionary}<|eot|>', "llama3_json"),
        ("{% for message in messages %}<tool_call>", None),
        ("", None),
    ],
)
def test_the_format_that_a_template_teaches(template: str, name: str | None) -> None:
    form = detect_tool_format(template)
    assert (form.name if form is not None else None) == name


def test_the_space_that_some_models_write_before_their_calls() -> None:
    form = detect_tool_format("{% if tools %}{{ '[TOOL_CALLS] [' }}")
    assert form is not None
    assert form.begin == "[TOOL_CALLS] ["


BOMBS = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "x\\n<}]"),
    ("hermes", '<tool_call>{"arguments": ', '{"parameters": '),
    ("hermes", "", "<tool_call>"),
    ("hermes", "", "<tool_call>{"),
    ("hermes", "", "<"),
    ("hermes", '<tool_call>{"name": "', "x"),
    ("llama3_json", "", "\n{"),
    ("llama3_json", "", '{"parameters": '),
    ("llama3_json", "", '{"name": "get_time"};'),
    ("mistral", "", "[TOOL_CALLS][{"),
    ("mistral", "[TOOL_CALLS]", "x"),
    ("mistral", "[TOOL_CALLS][", " ,"),
    ("json", "[", '{"name": "get_time", "arguments": {}},'),
    ("json", "", "\n["),
    ("json", "", '[{"parameters": '),
    ("qwen3_coder", "<function=get_weather>", "<parameter=city>\n\n\n</parameter>"),
    ("qwen3_coder", "<function=get_weather><parameter=days>", "1 "),
    ("glm45", "<tool_call>get_weather<arg_key>", "a</arg_key><arg_value>1</arg_value><arg_key>"),
    ("glm45", "", "<tool_call>x "),
    ("minimax_m2", "", '<invoke name="'),
    ("deepseek_v32", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'),
    ("deepseek_v3", "", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>", "x"),
    ("kimi_k2", "", "<|tool_call_begin|>functions.f:0"),
    ("granite", "", "<|tool_call|>[{"),
    ("minimax", "<tool_calls>", '{"name": "f"}'),
    ("pythonic", "", "\n[get_time("),
    ("pythonic", "[get_time(a=", "[{'a': ("),
    ("pythonic", "[get_time(a='", "\\x4"),
    ("pythonic", "[", "get_time(), "),
    ("olmo3", "<function_calls>", "get_time()\n"),
    ("gemma4", "<|tool_call>call:f{a:", "[{x:"),
    ("gemma4", '<|tool_call>call:f{a:<|"|>', "<|"),
    ("openai", "", "<|channel|>"),
    ("openai", "<|channel|>analysis<|message|>", "<|x"),
    ("openai", "", "to="),
]


# Those that read texts of other kinds, as marked JSON, bare JSON, tags, calls of Python, pairs, channels.
OF_OTHER_KINDS = {
    "hermes",
    "json",
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "deepseek_v32",
    "kimi_k2",
    "pythonic",
    "gemma4",
    "openai",
}
KEPT = {bomb[0]: bomb for bomb in BOMBS if bomb[0] in OF_OTHER_KINDS}


@pytest.mark.parametrize(("form", "start", "unit"), few(BOMBS, *KEPT.values()))
def test_time_is_linear_however_the_text_is_cut(form: str, start: str, unit: str) -> None:
    def seconds(length: int, size: int) -> float:
        text = start + unit * (length // len(unit))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        begin = time.process_time()
        parse(pieces, form)
        return time.process_time() - begin

    for size in (4, 1_000_000):
        short, long = (min(seconds(length, size) for _ in range(2)) for length in (12_500, 100_000))
        assert long < 24 * max(short, 0.002)  # 8 when linear, 64 when quadratic

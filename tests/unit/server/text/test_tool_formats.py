"""The formats of calls by name and by a model's template, their ids, and that reading takes linear time."""

from __future__ import annotations

import re
import time

import pytest

from quire_engine.errors import ConfigError
from quire_server.text.parsing.formats import TOOL_FORMATS, detect_tool_format, tool_format
from support.parsed import parse


def test_ids_are_unique_and_of_the_shape_that_clients_and_templates_expect() -> None:
    shapes = {name: form.new_id() for name, form in TOOL_FORMATS.items()}
    assert re.fullmatch(r"call_[0-9a-f]{24}", shapes["hermes"])
    assert re.fullmatch(r"[A-Za-z0-9]{9}", shapes["mistral"])
    assert len({TOOL_FORMATS["mistral"].new_id() for _ in range(100)}) == 100


def test_an_unknown_format_is_refused_with_all_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'pythonic' is unknown; known are hermes, json, llama3_json,"):
        tool_format("pythonic")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{...}</tool_call>", "hermes"),
        ("{% if tools %}<tool_call>\n<function=name>\n<parameter=a>", "qwen3_coder"),
        ('{% if tools %}{"name": function name, "parameters": dictionary}<|python_tag|><|eot_id|>', "llama3_json"),
        ("{% if tools %}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_args"),
        ("{% if tools %}{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{% if tools %}<tool_call>name<arg_key>", None),
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
]


@pytest.mark.parametrize(("form", "start", "unit"), BOMBS)
def test_time_is_linear_however_the_text_is_cut(form: str, start: str, unit: str) -> None:
    def seconds(length: int, size: int) -> float:
        text = start + unit * (length // len(unit))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        begin = time.process_time()
        parse(pieces, form)
        return time.process_time() - begin

    for size in (4, 1_000_000):
        short, long = (min(seconds(length, size) for _ in range(2)) for length in (25_000, 200_000))
        assert long < 24 * max(short, 0.002)  # 8 when linear, 64 when quadratic

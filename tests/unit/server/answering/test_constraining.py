"""The grammar of a request: what may be written under it and what may not, with marks that are tokens and without."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quire_server.answering.constraining.calls import reading_format
from quire_server.answering.constraining.constraints import Thinking, constraint
from quire_server.answering.options import GenerationOptions, PromptOptions, Structure, Tool, ToolOptions
from quire_server.errors import BadRequest
from quire_server.text.parsing.formats import FORCED, TOOL_FORMATS
from quire_server.text.parsing.reasoning import reasoning_format
from quire_server.text.parsing.tool_format import ToolFormat
from support.covering import few
from support.grammars import SPELLED, TOKENS, Vocabulary, verdict
from support.parsed import written

HERMES = TOOL_FORMATS["hermes"]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool(name="weather", parameters=CITY, strict=True)
SUM = Tool(name="sum", parameters={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
BOTH = (WEATHER, SUM)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>'


def grammar(
    structure: Structure | None = None,
    tools: ToolOptions | None = None,
    *,
    form: ToolFormat | None = HERMES,
    thinks: bool | None = None,
    asks: bool = True,
    thoughts: str = "qwen3",
    vocabulary: Vocabulary = TOKENS,
) -> str | None:
    """The rules for such a request; `thinks`: whether the prompt has opened the block, None for no thoughts."""
    options = GenerationOptions(prompt=PromptOptions(source=["x"], param="prompt"), structure=structure, tools=tools)
    found = constraint(
        options,
        tool_format=reading_format(tools, form),
        thinking=None
        if thinks is None
        else Thinking(marks=reasoning_format(thoughts).marks(vocabulary.token_id), is_open=thinks, is_asked=asks),
        token_id=vocabulary.token_id,
    )
    if found is None:
        return None
    unasked = thinks is False and not asks
    assert found.opener == (vocabulary.token_id("<think>") if unasked else None)
    assert found.grammar.client == "" or "@client" in found.grammar.rules
    return found.grammar.rules


def schema(value: object, *, compact: bool = False) -> Structure:
    return Structure(kind="json_schema", value=json.dumps(value), compact=compact)


def required(*tools: Tool, parallel: bool = True) -> ToolOptions:
    return ToolOptions(tools=tools, choice="required", parallel=parallel)


def check(
    rules: str | None, *, whole: tuple[str, ...], wrong: tuple[str, ...], vocabulary: Vocabulary = TOKENS
) -> None:
    assert rules is not None
    for text in whole:
        assert verdict(rules, text, vocabulary) == "whole", text
    for text in wrong:
        assert verdict(rules, text, vocabulary) != "whole", text


def test_without_a_wish_there_is_no_grammar():
    assert grammar() is None
    assert grammar(thinks=True) is None
    assert grammar(tools=ToolOptions(tools=(SUM,))) is None
    assert grammar(tools=ToolOptions(tools=BOTH, choice="none")) is None
    assert grammar(tools=ToolOptions(tools=BOTH), form=None) is None


def test_a_schema():
    check(
        grammar(schema(CITY)),
        whole=('{"city":"Paris"}', '{"city": "Paris"}', '{\n    "city": "é\\n\U0001f600"\n}'),
        wrong=("", "{}", '{"city": 1}', '{"city": "x", "y": 1}', ' {"city": "x"}', '{"city": "x"} '),
    )


def test_whitespace_is_bounded_and_can_be_forbidden():
    many = '{"city":' + " " * 9 + '"x"}'
    check(
        grammar(schema(CITY)),
        whole=('{ "city" : "x" }', "{\r\n" + " " * 32 + '"city":\t"x"\n}'),
        wrong=(many, '{\n\n"city": "x"}', "{\n" + " " * 33 + '"city": "x"}'),
    )
    check(grammar(schema(CITY, compact=True)), whole=('{"city":"x"}',), wrong=('{"city": "x"}',))


def test_any_object():
    check(grammar(Structure(kind="json_object")), whole=("{}", '{"a": [1, {"b": null}]}'), wrong=("[]", "1", '{"a"}'))


@pytest.mark.parametrize(
    ("pattern", "whole", "wrong"),
    [
        (r"[0-9]{3}", ("123",), ("12", "1234", "a")),
        (r"^a|b$", ("a", "b"), ("ab",)),
        (r"a/b\/c", ("a/b/c",), ("a",)),
        ("a\nb", ("a\nb",), ("a",)),
        (r"\d+ \w+", ("12 é",), ("a b",)),
        ('"[^"]*"', ('"x"',), ("x",)),
    ],
)
def test_a_regular_expression(pattern: str, whole: tuple[str, ...], wrong: tuple[str, ...]):
    check(grammar(Structure(kind="regex", value=pattern)), whole=whole, wrong=wrong)


def test_choices():
    odd = ['"', "\\", "\n", "\x01\x7f", "\u2028", "é", "\U0001f600", "a/b", "%json {}", "<[0]>", "yes", "yes, sir"]
    check(grammar(Structure(kind="choice", value=json.dumps(odd))), whole=tuple(odd), wrong=("", "no", "yes,", "a"))


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (Structure(kind="choice", value='["a <think> b", "</s>"]'), "a <think> b"),
        (Structure(kind="regex", value="a <think>( b|c)<.im_end.>"), "a <think>c<|im_end|>"),
        (schema({"const": "<tool_call>"}), '"<tool_call>"'),
        (schema({"enum": ["<think>", "<thin", "<|im_end|>"]}), '"<|im_end|>"'),
        (
            schema({"properties": {"<think>": {"const": 1}}, "required": ["<think>"], "additionalProperties": False}),
            '{"<think>":1}',
        ),
        (schema({"type": "string", "pattern": "^</think>$"}), '"</think>"'),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_names_of_special_tokens_are_text(structure: Structure, text: str):
    rules = grammar(structure)
    assert rules is not None
    assert verdict(rules, text, is_plain=True) == "whole"
    assert verdict(rules, text) != "whole"  # the tokens themselves, which the answer's text would lack


def test_a_call_may_have_the_names_of_its_marks_as_text():
    tool = Tool(
        name="quote", parameters={"type": "object", "properties": {"a": {"enum": ["</tool_call>"]}}, "required": ["a"]}
    )
    rules = grammar(tools=required(tool, parallel=False))
    assert rules is not None
    begin, text, end = '<tool_call>\n{"name": "quote", "arguments": {"a": "', "</tool_call>", '"}}\n</tool_call>'
    ids = [*TOKENS.tokens(begin), *TOKENS.tokens(text, is_plain=True), *TOKENS.tokens(end)]
    assert verdict(rules, ids) == "whole"
    assert verdict(rules, begin + text + end) != "whole"


def test_required_calls():
    check(
        grammar(tools=required(*BOTH)),
        whole=(CALL, OTHER, f"{CALL}\n{OTHER}\n{CALL}"),
        wrong=(
            "",
            "hello",
            f"{CALL}{CALL}",
            f"{CALL}\n",
            CALL.replace("weather", "wether"),
            CALL.replace('"Paris"', "1"),
        ),
    )
    check(grammar(tools=required(*BOTH, parallel=False)), whole=(CALL,), wrong=(f"{CALL}\n{OTHER}",))


def test_a_named_call_is_that_one_once():
    named = ToolOptions(tools=BOTH, choice="function", function="sum")
    check(grammar(tools=named), whole=(OTHER,), wrong=(CALL, f"{OTHER}\n{OTHER}"))


@pytest.mark.parametrize("vocabulary", [TOKENS, SPELLED], ids=["tokens", "spelled"])
def test_strict_tools_bind_calls_and_leave_other_text_free(vocabulary: Vocabulary):
    check(
        grammar(tools=ToolOptions(tools=BOTH), vocabulary=vocabulary),
        whole=("", "Hello <tool> {}", CALL, f"Let me see.\n{CALL}\n{OTHER}"),
        wrong=("<tool_call>", f"{CALL} and", f"x{CALL.replace('city', 'town')}", "<tool_call>\nhello"),
        vocabulary=vocabulary,
    )


def test_strict_tools_in_a_format_without_an_opener():
    call = '{"name": "weather", "parameters": {"city": "Paris"}}'
    check(
        grammar(tools=ToolOptions(tools=BOTH), form=TOOL_FORMATS["llama3_json"]),
        whole=("", "Hello {}", call, f"{call}; {call}"),
        wrong=("{", '{"name": "weather", "parameters": {}}', '{"a": 1}'),
    )


def test_strict_tools_of_a_model_that_is_told_of_them_in_words():
    call = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
    check(
        grammar(tools=ToolOptions(tools=BOTH), form=FORCED),
        whole=("Hello [1] {}", call),
        wrong=("[", '{"name": "weather", "arguments": {}}', " {", call.replace("city", "town")),
    )


def test_a_structured_answer_or_calls():
    check(
        grammar(schema({"type": "integer"}), ToolOptions(tools=BOTH)),
        whole=("12", CALL, f"{CALL}\n{OTHER}"),
        wrong=("", "hello", f"12{CALL}"),
    )
    check(grammar(schema({"type": "integer"}), required(*BOTH)), whole=(CALL,), wrong=("12",))


def test_calls_that_cannot_be_told_from_the_answer_are_refused():
    with pytest.raises(BadRequest, match="cannot be told from a structured answer"):
        grammar(schema(CITY), ToolOptions(tools=BOTH), form=TOOL_FORMATS["llama3_json"])


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_every_format_writes_what_it_reads(name: str):
    form = reading_format(required(*BOTH), TOOL_FORMATS[name])
    assert form is not None
    calls = [("weather", '{"city":"Paris"}'), ("sum", '{"a":1}')]
    text = written(form, calls[:1] if form.one_call else calls)
    check(grammar(tools=required(*BOTH), form=TOOL_FORMATS[name]), whole=(text,), wrong=(text[:-1], "x"))


def test_a_format_that_is_not_json_forces_plain_json():
    gemma = TOOL_FORMATS["gemma4"]
    assert reading_format(required(SUM), gemma) is FORCED
    assert reading_format(ToolOptions(tools=BOTH), gemma) is gemma
    with pytest.raises(BadRequest, match="cannot be enforced in the format"):
        grammar(tools=ToolOptions(tools=BOTH), form=gemma)


PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "where": {"$ref": "#/$defs/spot"},
    },
    "required": ["city", "days"],
    "$defs": {"spot": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False}},
}
ONE_BY_ONE = sorted({form.name for form in TOOL_FORMATS.values() if form.parameters is not None})


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("spelled", few([False, True], False), ids=["tokens", "spelled"])
def test_arguments_one_by_one(name: str, spelled: bool):
    form = TOOL_FORMATS[name]
    vocabulary = SPELLED if spelled else Vocabulary(marks=form.markers)
    tools = ToolOptions(tools=(Tool(name="look", parameters=PLACE, strict=True), Tool(name="any", parameters=None)))

    def calls(*arguments: dict[str, object], tool: str = "look") -> str:
        return written(form, [(tool, json.dumps(each)) for each in arguments])

    full = {"city": "Pa\n<x> ris", "unit": "C", "days": 3, "where": {"x": 1.5}}
    if form.parameters is not None and form.parameters.separator:  # required ones come first
        full = {name: full[name] for name in ("city", "days", "unit", "where")}
    check(
        grammar(tools=tools, form=form, vocabulary=vocabulary),
        whole=(
            "",
            "Hello <x>",
            calls(full),
            f"So.\n{calls({'city': '', 'days': -1}, full)}",
            calls({"a": "b", "c": "d"}, tool="any"),
            calls({}, tool="any"),
        ),
        wrong=(
            calls({"city": "Rome"}),
            calls({"city": "Rome", "days": "three"}),
            calls({"city": "Rome", "unit": "K", "days": 3}),
            calls({"city": "Rome", "days": 3, "where": {"y": 1}}),
            calls({"town": "Rome", "days": 3}),
            calls(full, tool="other"),
            f"{calls(full)} and",
        ),
        vocabulary=vocabulary,
    )
    check(
        grammar(tools=replace(tools, choice="required", parallel=False), form=form, vocabulary=vocabulary),
        whole=(calls(full),),
        wrong=("", "Hello", calls(full, full)),
        vocabulary=vocabulary,
    )


def test_arguments_of_which_none_is_required():
    form = TOOL_FORMATS["pythonic"]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}}
    check(
        grammar(tools=required(Tool(name="f", parameters=schema)), form=form),
        whole=("[f()]", "[f(a=1)]", "[f(b=2, c=3)]", "[f(a=1, c=3), f(c=1)]"),
        wrong=("[f(a=1 b=2)]", "[f(, a=1)]", "[f(a=1,)]", "[f(d=1)]", "[f(c=3, a=1)]"),
    )


def test_what_cannot_be_enforced_in_a_tag_is_refused():
    narrow = {"type": "object", "properties": {"zip": {"type": "string", "pattern": "[0-9]+"}}}
    form = TOOL_FORMATS["qwen3_coder"]
    assert grammar(tools=required(Tool(name="f", parameters=narrow)), form=form) is not None
    with pytest.raises(BadRequest, match="'pattern' of a string is not supported"):
        grammar(tools=required(Tool(name="f", parameters=narrow, strict=True)), form=form)


@pytest.mark.parametrize("vocabulary", [TOKENS, SPELLED], ids=["tokens", "spelled"])
def test_thoughts_come_first(vocabulary: Vocabulary):
    yes = Structure(kind="choice", value='["yes"]')
    thought = "<think>\nHm {} < </thin\n</think>\n\n"
    check(
        grammar(yes, thinks=False, vocabulary=vocabulary),
        whole=("yes", f"{thought}yes", "<think></think>yes"),
        wrong=("no", f"{thought}no", "<think>yes", f"{thought}{thought}yes", thought),
        vocabulary=vocabulary,
    )
    check(
        grammar(yes, thinks=True, vocabulary=vocabulary),
        whole=(f"{thought.removeprefix('<think>')}yes", "</think>yes"),
        wrong=("yes", "Hm\n", "Hm</think>no"),
        vocabulary=vocabulary,
    )


def test_thoughts_that_are_not_asked_for_need_a_mark_that_is_a_token():
    yes = Structure(kind="choice", value='["yes"]')
    check(grammar(yes, thinks=False, asks=False), whole=("yes", "<think>Hm</think>yes"), wrong=("no",))
    spelled = grammar(yes, thinks=False, asks=False, vocabulary=SPELLED)
    check(spelled, whole=("yes",), wrong=("<think>Hm</think>yes",), vocabulary=SPELLED)


def test_thoughts_before_calls():
    check(grammar(tools=required(*BOTH), thinks=True), whole=(f"Hm\n</think>\n\n{CALL}",), wrong=(CALL,))


HARMONY_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm\n{}<|end|><|start|>assistant"
CHANNELS = Vocabulary(marks=TOOL_FORMATS["openai"].markers)


@pytest.mark.parametrize("vocabulary", [CHANNELS, SPELLED], ids=["tokens", "spelled"])
def test_a_reply_in_channels(vocabulary: Vocabulary):
    harmony, answer = TOOL_FORMATS["openai"], "<|channel|>final<|message|>"
    yes = grammar(
        Structure(kind="choice", value='["yes"]'), thinks=False, thoughts="openai_gptoss", vocabulary=vocabulary
    )
    check(
        yes,
        whole=(f"{answer}yes", f"{HARMONY_THOUGHT}{answer}yes"),
        wrong=("yes", f"{answer}no", f"{HARMONY_THOUGHT}yes", f"{HARMONY_THOUGHT}{HARMONY_THOUGHT}{answer}yes"),
        vocabulary=vocabulary,
    )
    check(
        grammar(tools=required(*BOTH), form=harmony, thinks=False, thoughts="openai_gptoss", vocabulary=vocabulary),
        whole=(HARMONY_CALL, HARMONY_THOUGHT + HARMONY_CALL),
        wrong=(f"{answer}Hello", HARMONY_CALL.replace("city", "town"), HARMONY_CALL * 2),
        vocabulary=vocabulary,
    )
    check(
        grammar(
            tools=ToolOptions(tools=BOTH), form=harmony, thinks=False, thoughts="openai_gptoss", vocabulary=vocabulary
        ),
        whole=(HARMONY_CALL, HARMONY_THOUGHT + HARMONY_CALL, f"{answer}Hello", f"{HARMONY_THOUGHT}{answer}Hello"),
        wrong=("Hello", HARMONY_CALL.replace("city", "town")),
        vocabulary=vocabulary,
    )
    check(
        grammar(
            schema({"type": "integer"}),
            ToolOptions(tools=BOTH),
            form=harmony,
            thinks=False,
            thoughts="openai_gptoss",
            vocabulary=vocabulary,
        ),
        whole=(f"{answer}12", HARMONY_CALL),
        wrong=("12", f"{answer}x"),
        vocabulary=vocabulary,
    )


def test_marks_of_thoughts_with_more_than_one_token():
    vocabulary = Vocabulary(marks=("<|channel>", "<channel|>"))
    check(
        grammar(Structure(kind="choice", value='["yes"]'), thinks=False, thoughts="gemma4", vocabulary=vocabulary),
        whole=("yes", "<|channel>thought\nHm\n<channel|>yes"),
        wrong=("<|channel>yes", "<|channel>thought\nHm"),
        vocabulary=vocabulary,
    )


def test_calls_are_numbered_where_the_format_does():
    call = '<|tool_calls_section_begin|><|tool_call_begin|>functions.sum:12<|tool_call_argument_begin|>{"a": 1}'
    call += "<|tool_call_end|><|tool_calls_section_end|>"
    kimi = TOOL_FORMATS["kimi_k2"]
    for vocabulary in (Vocabulary(marks=kimi.markers), SPELLED):
        check(
            grammar(tools=ToolOptions(tools=BOTH), form=kimi, vocabulary=vocabulary),
            whole=("Hello", call, f"Hello {call}"),
            wrong=(call.replace(":12", ""), call.replace('"a"', '"b"'), f"{call} x"),
            vocabulary=vocabulary,
        )


def test_tools_that_are_not_strict_keep_what_can_be_kept():
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    loose = Tool(name="set", parameters={"type": "object", "properties": {"tags": tags}, "required": ["tags"]})
    call = CALL.replace("weather", "set").replace('{"city": "Paris"}', '{"tags": ["a"]}')
    check(grammar(tools=required(loose)), whole=(call,), wrong=(call.replace('["a"]', "[1]"),))
    strict = Tool(name="set", parameters=loose.parameters, strict=True)
    with pytest.raises(
        BadRequest, match=r"'set' cannot be enforced: 'uniqueItems' at #/properties/tags is not supported"
    ):
        grammar(tools=required(strict))


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}])
def test_tools_without_parameters_take_any_object(parameters: dict[str, object] | None):
    call = OTHER.replace('{"a": 1}', '{"b": [2]}')
    check(
        grammar(tools=required(Tool(name="sum", parameters=parameters))),
        whole=(call,),
        wrong=(call.replace("{", "[", 2),),
    )


def test_a_clients_grammar():
    structure = Structure(kind="grammar", value='root ::= "a"')
    options = GenerationOptions(prompt=PromptOptions(source=["x"], param="prompt"), structure=structure)
    found = constraint(options, tool_format=None, thinking=None, token_id=TOKENS.token_id)
    assert found is not None
    assert (found.grammar.rules, found.grammar.client) == ("start: @client", 'root ::= "a"')


def test_what_is_asked_for_is_not_changed():
    before = json.dumps(CITY)
    grammar(tools=required(WEATHER))
    assert json.dumps(CITY) == before

"""What each format's reader takes for calls and for content, on fixed texts at every cut."""

from __future__ import annotations

import pytest

from quire_server.text.parsing.calls import CallDelta
from quire_server.text.parsing.formats import TOOL_FORMATS, tool_format
from quire_server.text.parsing.reply_parser import ReplyParser
from support.parsed import Parsed, check_cuts, parse

PARIS = ("get_weather", '{"city": "Paris"}')
NOON = ("get_time", "{}")
# A string with all that could end it too early, and the arguments that hold it.
HARD = r'{"city": "\"}]</tool_call>[TOOL_CALLS]<|python_tag|>\\", "place": {"x": [1, {"é\u00e9": "}"}], "y": null}}'

# Format, text, content (None: all of it), calls; and whether a call could not be read.
CASES = [
    ("hermes", "Just text.\n", "Just text.\n", [], False),
    ("hermes", "\n\nText\n\n", "\n\nText\n\n", [], False),
    ("hermes", "1 < 2 <tool <tool_cal", "1 < 2 <tool <tool_cal", [], False),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [PARIS],
        False,
    ),
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"name": "get_time"}</tool_call>\n',
        "I look.\n",
        [PARIS, NOON],
        False,
    ),
    ("hermes", '<tool_call>{"name": "get_time"}</tool_call>\n\nDone.', "\n\nDone.", [NOON], False),
    ("hermes", '\n\n<tool_call>{"name": "get_time"}</tool_call>', "", [NOON], False),
    (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {HARD}}}</tool_call>',
        "",
        [("get_weather", HARD)],
        False,
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', "", [PARIS], False),
    ("hermes", '<tool_call>{"name": "get_weather", "parameters": {"city": "Paris"}}</tool_call>', "", [PARIS], False),
    (
        "hermes",
        r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}</tool_call>',
        "",
        [PARIS],
        False,
    ),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "", [NOON], False),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": ""}</tool_call>', "", [NOON], False),
    ("hermes", '<tool_call>{"id": 7, "x": {"name": "no"}, "name": "get_time"}</tool_call>', "", [NOON], False),
    ("hermes", '<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>', "", [("unheard_of", "{}")], False),
    # One brace too many or too few, and no closing tag: still what was meant.
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}}}\n</tool_call>', "", [NOON], False),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}\n</tool_call>!', "!", [NOON], False),
    ("hermes", '<tool_call>{"name": "get_time", "arguments": {}}\nNow', "\nNow", [NOON], False),
    # Not JSON: the client sees what the model wrote, and so can the model.
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call>',
        "",
        [("get_weather", '{"city": Paris}')],
        True,
    ),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"\n</tool_call>\nSo.',
        "\nSo.",
        [("get_weather", '{"city": "Paris"\n')],
        True,
    ),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>', "", [("get_weather", "[1]")], True),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"a": NaN}}</tool_call>',
        "",
        [("get_weather", '{"a": NaN}')],
        True,
    ),
    # No call: content as it was written.
    ("hermes", "<tool_call>\nget_time()\n</tool_call>", "<tool_call>\nget_time()\n</tool_call>", [], True),
    ("hermes", '<tool_call> {"city": 1} </tool_call>', '<tool_call> {"city": 1} </tool_call>', [], True),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', [], True),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', '<tool_call>{"name": ""}</tool_call>', [], True),
    # Cut off by the limit of tokens.
    ("hermes", 'So: <tool_call>\n{"name": "get_we', 'So: <tool_call>\n{"name": "get_we', [], True),
    (
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa',
        "",
        [("get_weather", '{"city": "Pa')],
        True,
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Pa', '<tool_call>{"arguments": {"city": "Pa', [], True),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [PARIS], False),
    ("llama3_json", '\n {"type": "function", "name": "get_time", "parameters": {}}\n', "", [NOON], False),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}};',
        "",
        [PARIS, NOON],
        False,
    ),
    ("llama3_json", '{"name": "get_time"}\n{"name": "get_time"}{"name": "get_time"}', "", [NOON] * 3, False),
    ("llama3_json", '{"parameters": {"city": "Paris"}, "name": "get_weather"}', "", [PARIS], False),
    ("llama3_json", 'I look:\n\n  {"name": "get_time"}', "I look:\n\n  ", [NOON], False),
    (
        "llama3_json",
        '<|python_tag|>{"name": "unheard_of", "parameters": {}}; {"name": "get_time"}',
        "",
        [("unheard_of", "{}"), NOON],
        False,
    ),
    ("llama3_json", 'Then <|python_tag|> {"name": "get_time"}', "Then ", [NOON], False),
    # Answers in JSON are no calls.
    ("llama3_json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', [], False),
    ("llama3_json", '{"name": "get_time", "age": 36}', '{"name": "get_time", "age": 36}', [], False),
    ("llama3_json", '{"city": {"name": "get_time"}}', '{"city": {"name": "get_time"}}', [], False),
    ("llama3_json", 'Write {"name": "get_time"} there.', 'Write {"name": "get_time"} there.', [], False),
    ("llama3_json", '{{"name": "get_time"}}\n{', '{{"name": "get_time"}}\n{', [], False),
    ("llama3_json", '<|python_tag|>print("é")', '<|python_tag|>print("é")', [], False),
    ("llama3_json", '{"name": "get_time"}; {"age": 1}; x', '; {"age": 1}; x', [NOON], False),
    ("mistral", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS], False),
    (
        "mistral",
        'Now. [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time"}] ok',
        "Now.  ok",
        [PARIS, NOON],
        False,
    ),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}', "", [PARIS, NOON], False),
    ("mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris"}', "", [PARIS], False),
    ("mistral", 'x[TOOL_CALLS]get_weather{"city": "Paris"}y', "xy", [PARIS], False),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{HARD}", "", [("get_weather", HARD)], False),
    ("mistral", '[TOOL_CALLS]{"name": "get_time"}', "", [NOON], False),
    ("mistral", "[TOOL_CALLS] no call", "[TOOL_CALLS] no call", [], True),
    ("mistral", "[TOOL_CALLS][ARGS]{}", "[TOOL_CALLS][ARGS]{}", [], False),
    ("mistral", '[TOOL_CALLS][{"name": "get_time"}, 1]', ", 1]", [NOON], False),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", [], False),
    ("mistral", "[TOOL_CALLS]get_time[AR", "[TOOL_CALLS]get_time[AR", [], True),
    ("mistral", '[TOOL_CALLS]get_time[ARGS]{"a": ', "", [("get_time", '{"a": ')], True),
    (
        "json",
        '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]',
        "",
        [PARIS, NOON],
        False,
    ),
    ("json", ' {"name": "get_weather", "arguments": {"city": "Paris"}}\n', "", [PARIS], False),
    ("json", '[{"name": "get_weather", "arguments": {"city": "Par', "", [("get_weather", '{"city": "Par')], True),
    ("json", "Sorry.", "Sorry.", [], False),
    ("json", 'I look.\n[{"name": "get_time"},\n {"name": "get_time"}]', "I look.\n", [NOON, NOON], False),
    ("json", '```json\n{"name": "get_time", "arguments": {}}\n```', "```json\n\n```", [NOON], False),
    # Answers in JSON are no calls, also where tools are told of in words.
    ("json", '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', [], False),
    ("json", '[{"city": {"name": "get_time"}}, {"name": "get_time"}]', None, [], False),
    ("json", '{"name": "unheard_of", "arguments": {}}', None, [], False),
    ("json", " [1, 2]", " [1, 2]", [], False),
    ("json", '[{"name": "get_time"}] and [{"name": "get_time"}]', ' and [{"name": "get_time"}]', [NOON], False),
]


@pytest.mark.parametrize(("form", "text", "content", "calls", "fails"), CASES)
def test_content_and_calls(
    form: str, text: str, content: str | None, calls: list[tuple[str, str]], fails: bool
) -> None:
    whole = parse([text], form)
    expected = text if content is None else content
    assert (whole.content, whole.calls, whole.error is not None) == (expected, tuple(calls), fails)
    check_cuts(form, text, whole)


def test_name_and_arguments_come_as_soon_as_they_are_written() -> None:
    parser = ReplyParser(tool_format=TOOL_FORMATS["hermes"], new_id=lambda: "call_1")
    seen = []
    for piece in (
        '<tool_call>\n{"name": "get',
        '_weather"',
        ', "arguments": {"ci',
        'ty": "Pa',
        'ris"}',
        "}\n</tool_call>",
    ):
        parser.push(-1, piece)
        seen.append(parser.calls)
        parser.calls = []
    assert seen == [
        [],
        [CallDelta(index=0, id="call_1", name="get_weather")],
        [CallDelta(index=0, arguments='{"ci')],
        [CallDelta(index=0, arguments='ty": "Pa')],
        [CallDelta(index=0, arguments='ris"}')],
        [],
    ]


def test_content_waits_only_for_what_may_become_a_marker() -> None:
    parser = ReplyParser(tool_format=TOOL_FORMATS["hermes"])
    assert [parser.push(-1, piece) for piece in ("a <", "b <tool", "_call", "ed>", "\n")] == [
        "a ",
        "<b ",
        "",
        "<tool_called>",
        "\n",
    ]


@pytest.mark.parametrize("form", ["hermes", "mistral", "json"])
def test_only_the_first_call_is_kept_where_calls_are_not_parallel(form: str) -> None:
    pieces = tool_format(form)
    call = pieces.before_name + '"get_time"' + pieces.between_name_and_arguments + "{}" + pieces.after_call
    text = pieces.begin + pieces.separator.join([call] * 3) + pieces.end
    assert parse([text], form, parallel=False) == Parsed(calls=(NOON,), ids=("call_0",))
    assert parse([text], form).calls == (NOON,) * 3

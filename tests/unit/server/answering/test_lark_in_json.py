"""A custom tool's grammar inside of the JSON of a call: the same texts, escaped; refused where that cannot be."""

from __future__ import annotations

import json

import pytest

from quire_server.answering.constraining.calls import written_calls
from quire_server.answering.constraining.json_schema import SchemaRefused
from quire_server.answering.constraining.lark_in_json import in_json
from quire_server.answering.options import Tool, ToolOptions
from quire_server.errors import BadRequest
from quire_server.text.parsing.formats import TOOL_FORMATS
from support.grammars import TOKENS, verdict

PATCH = r"""
start: begin hunk+ end   // a patch
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | delete
add: "*** Add File: " filename LF line+
delete: "*** Delete File: " filename LF
filename: /(.+)/
line: "+" /(.*)/ LF -> added
%import common.LF
"""
SUMS = """
start: sum
sum: term (("+" | "-") term)*
term: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
"""


def accepted(grammar: str, text: str, *, syntax: str = "lark", name: str = "hermes") -> bool:
    """Whether a model may call the tool with this input."""
    tool = Tool(name="edit", parameters={"type": "object"}, input_grammar=grammar, input_syntax=syntax)  # type: ignore[arg-type]
    calls = written_calls(ToolOptions(tools=(tool,)), TOOL_FORMATS[name], None, TOKENS.token_id)
    assert calls is not None
    rules = "\n".join([f"start: {calls.start}", *calls.rules])
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return verdict(rules, f'<tool_call>\n{{"name": "edit", "arguments": {arguments}}}\n</tool_call>') == "whole"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("*** Begin Patch\n*** Delete File: a.py\n*** End Patch", True),
        ('*** Begin Patch\n*** Add File: ü "x"\\y\n+print("\\n")\t\x01\n+\n*** Delete File: b\n*** End Patch\n', True),
        ("*** Begin Patch\n*** End Patch", False),
        ("*** Begin Patch\n*** Add File: a.py\nprint()\n*** End Patch", False),
        ("*** Begin Patch\n*** Add File: \n+\n*** End Patch", False),
        ("hello", False),
    ],
)
def test_a_patch(text: str, is_one: bool):
    assert accepted(PATCH, text) == is_one


def test_rules_that_refer_to_themselves():
    assert accepted(SUMS, "1+(2-30)")
    assert not accepted(SUMS, "1+(2-30")


@pytest.mark.parametrize(
    ("pattern", "whole", "wrong"),
    [
        (r'[a"\\]+', 'a"\\', "b"),
        (r"[^a-z]{2}", '\n"', "a\n"),
        (r"a.b", 'a"b', "a\nb"),
        (r"\s\d\x41\u{e9}\/", "\t5Aé/", " xAé/"),
        (r"(\n|\")+x?", '\n"\nx', "x"),
        (r"\W\D", '""', '"1'),
    ],
)
def test_expressions(pattern: str, whole: str, wrong: str):
    assert accepted(pattern, whole, syntax="regex")
    assert not accepted(pattern, wrong, syntax="regex")


def test_other_tools_and_texts_stay_free():
    tools = (Tool(name="edit", parameters={}, input_grammar=PATCH), Tool(name="look", parameters={"type": "object"}))
    calls = written_calls(ToolOptions(tools=tools), TOOL_FORMATS["hermes"], None, TOKENS.token_id)
    assert calls is not None
    rules = "\n".join([f"start: {calls.start}", *calls.rules])
    assert verdict(rules, "Hello, \\ world") == "whole"
    assert verdict(rules, '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>') == "whole"


def test_where_calls_are_not_json_the_grammar_is_not_enforced():
    tools = ToolOptions(tools=(Tool(name="edit", parameters={}, input_grammar=PATCH),))
    assert written_calls(tools, TOOL_FORMATS["qwen3_coder"], None, TOKENS.token_id) is None


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("start: %json {}", "%json"),
        ('start: "a".."z"', "'..'"),
        ("start: /a/ & /b/", "'&'"),
        ("start: /(?i)a/", "options"),
        (r"start: /a\b/", r"\b"),
        ('start: "(" start? ")" | /[^()]+/', "refer to themselves"),
        ("start: /./ \n%ignore /[ ]+/", "ignores"),
        ("%import common.SQL_COMMENT\nstart: SQL_COMMENT", "SQL_COMMENT"),
        ("start: /[a-z&&[^x]]/", "class of characters"),
        ("start: /" + "[" * 60_000 + "/", "has no end"),
        ('start: "' + r"\"" * 30_000, "has no end"),
        ("start: /" + r"\/" * 30_000, "has no end"),
    ],
)
def test_what_cannot_be_written_in_json_is_refused(grammar: str, words: str):
    with pytest.raises(SchemaRefused, match=words.replace("\\", "\\\\").replace(".", r"\.")):
        in_json(grammar)
    with pytest.raises(BadRequest, match="'edit' cannot be enforced"):
        accepted(grammar, "")

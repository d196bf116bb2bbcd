"""What clients say of an answer's form, by every name: one neutral wish, or a refusal that names the field."""

from __future__ import annotations

import json
import re

import pytest

from quire_server.answering.constraining.calls import MAX_RULES_CHARS
from quire_server.answering.constraining.schemas import MAX_SCHEMA_CHARS, MAX_SCHEMA_DEPTH
from quire_server.answering.options import Structure
from quire_server.dialects.chat.wire import ChatCompletionRequest
from quire_server.dialects.completions.wire import CompletionRequest
from quire_server.dialects.structure import MAX_GRAMMAR_CHARS, MAX_REGEX_CHARS, MAX_STRUCTURE_CHOICES
from quire_server.errors import BadRequest
from quire_server.http.body import validate
from support.documents import section

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
EBNF = 'root ::= "a"'
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def asked(**fields: object) -> tuple[Structure | None, tuple[str, ...]]:
    """The wish, the same on both endpoints, and what is ignored."""
    chat = validate(ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], **fields}).options()
    completion = validate(CompletionRequest, {"prompt": "a", **fields}).options()
    assert (chat.structure, chat.ignored) == (completion.structure, completion.ignored)
    return chat.structure, chat.ignored


SAME = [
    ("response_format", NAMED, "json_schema", TEXT),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "json_schema", TEXT),
    ("response_format", {"type": "json_schema", "schema": SCHEMA}, "json_schema", TEXT),
    ("response_format", {"type": "json_object"}, "json_object", ""),
    ("response_format", {"type": "json_object", "schema": SCHEMA}, "json_schema", TEXT),
    ("structured_outputs", {"json": SCHEMA}, "json_schema", TEXT),
    ("structured_outputs", {"json": TEXT}, "json_schema", TEXT),
    ("structured_outputs", {"regex": "a+"}, "regex", "a+"),
    ("structured_outputs", {"choice": ["a", "b"]}, "choice", '["a", "b"]'),
    ("structured_outputs", {"grammar": EBNF}, "grammar", EBNF),
    ("structured_outputs", {"json_object": True}, "json_object", ""),
    ("guided_json", SCHEMA, "json_schema", TEXT),
    ("guided_json", TEXT, "json_schema", TEXT),
    ("guided_regex", "a+", "regex", "a+"),
    ("guided_choice", ["a", "b"], "choice", '["a", "b"]'),
    ("guided_grammar", EBNF, "grammar", EBNF),
    ("guided_json_object", True, "json_object", ""),
    ("json_schema", TEXT, "json_schema", TEXT),
    ("json_schema", SCHEMA, "json_schema", TEXT),
    ("regex", "a+", "regex", "a+"),
    ("ebnf", EBNF, "grammar", EBNF),
    ("grammar", EBNF, "grammar", EBNF),
]


@pytest.mark.parametrize(("param", "value", "kind", "text"), SAME)
def test_every_name_says_the_same(param: str, value: object, kind: str, text: str):
    structure, ignored = asked(**{param: value})
    assert structure == Structure(kind=kind, value=text, param=param)
    assert ignored == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"grammar": "", "guided_json_object": False},
    ],
)
def test_no_wish(fields: dict[str, object]):
    assert asked(**fields) == (None, ())


def test_compact_json():
    structure, _ = asked(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert structure is not None
    assert structure.compact


def test_what_has_no_effect_is_named():
    form = {**NAMED, "x": 1, "json_schema": {**NAMED["json_schema"], "y": 1}}
    _, ignored = asked(response_format=form, guided_decoding_backend="outlines")
    assert ignored == ("guided_decoding_backend", "response_format.x", "response_format.json_schema.y")
    _, ignored = asked(structured_outputs={"regex": "a", "_backend": "xgrammar", "_backend_was_auto": None})
    assert ignored == ("structured_outputs._backend",)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *[("response_format", value) for value in ("json_object", {}, {"type": "json"}, {"type": 1}, [], True)],
        ("response_format", {"type": "structural_tag", "format": {}}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": TEXT}}),
        ("response_format", {"type": "json_object", "json_schema": {"schema": SCHEMA}}),
        ("response_format", {"type": "text", "json_schema": {"schema": SCHEMA}}),
        ("structured_outputs", {}),
        ("structured_outputs", {"json_object": False}),
        ("structured_outputs", {"json": SCHEMA, "regex": "a"}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"choice": [""]}),
        ("structured_outputs", {"choice": "a"}),
        ("structured_outputs", {"regex": "a", "structural_tag": "{}"}),
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " *"}),
        ("structured_outputs", {"json": SCHEMA, "disable_additional_properties": True}),
        ("structural_tag", "{}"),
        ("guided_whitespace_pattern", " *"),
        *[("guided_json", value) for value in ([], 1, True, "x" * (MAX_GRAMMAR_CHARS + 1))],
        ("guided_json", {"enum": ["x" * MAX_GRAMMAR_CHARS]}),
        *[("guided_regex", value) for value in ("", 1, "x" * (MAX_REGEX_CHARS + 1))],
        *[("guided_choice", value) for value in ([], [1], "a", ["x"] * (MAX_STRUCTURE_CHOICES + 1))],
        ("guided_choice", ["x" * MAX_GRAMMAR_CHARS]),
        *[("guided_grammar", value) for value in ("", {}, "x" * (MAX_GRAMMAR_CHARS + 1))],
    ],
)
def test_refusals_name_the_field(param: str, value: object):
    with pytest.raises(BadRequest) as refused:
        asked(**{param: value})
    assert re.split(r"[.\[]", str(refused.value.param))[0] == param
    assert len(refused.value.message) < 600


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": NAMED, "guided_regex": "a"},
        {"guided_json": SCHEMA, "json_schema": SCHEMA},
        {"regex": "a", "ebnf": EBNF},
    ],
)
def test_two_wishes_are_refused(fields: dict[str, object]):
    with pytest.raises(BadRequest, match="both constrain the answer") as refused:
        asked(**fields)
    assert refused.value.param == list(fields)[1]


def test_the_api_page_says_the_bounds():
    limits = section("docs/api.md", "Limits")
    assert MAX_GRAMMAR_CHARS == MAX_SCHEMA_CHARS
    bounds = f"{MAX_GRAMMAR_CHARS} characters; {MAX_REGEX_CHARS}; {MAX_STRUCTURE_CHOICES}"
    assert f"| a JSON schema or grammar; a regular expression; choices | {bounds} | 400 |" in limits
    assert f"without what only describes | {MAX_RULES_CHARS} characters | 400 |" in limits
    assert f"| depth of a JSON schema | {MAX_SCHEMA_DEPTH} | 400 |" in limits

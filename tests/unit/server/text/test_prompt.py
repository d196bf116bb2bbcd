"""Chat templates: equal to transformers' rendering, and harmless whatever the template or the client does."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_server.errors import BadRequest
from quire_server.text.prompt import ChatTemplate
from support.chat_templates import CHAT, CHATML, INST, PARTS, TOKENIZER, TOOLS, templates


@pytest.fixture(scope="module")
def make() -> Iterator[object]:
    with templates() as build:
        yield build


def peer(source: str, messages: list, **options: object) -> str:
    """The same rendering by transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template([messages], chat_template=source, bos_token="<s>", eos_token="</s>", **options)
    return texts[0]


def to_ids(template: ChatTemplate, content: str) -> list[int]:
    return TOKENIZER.encode(template.render([{"role": "user", "content": content}]), add_special_tokens=False)


@pytest.mark.parametrize("source", [CHATML, INST], ids=["chatml", "inst"])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("generation", [True, False])
def test_renders_as_transformers(make, source: str, count: int, generation: bool) -> None:
    text = make(source).render(CHAT[:count], add_generation_prompt=generation)
    assert text == peer(source, CHAT[:count], add_generation_prompt=generation)


@pytest.mark.parametrize("source", [CHATML, INST], ids=["chatml", "inst"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon \n", ""])
def test_continues_the_final_message_as_transformers(make, source: str, content: str) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": content}]
    text = make(source).render(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == peer(source, chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("Once upon" + content[9:] if source is CHATML and content else content.rstrip())


def test_plain_json_filter_as_transformers(make) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"q": "<é&'>"}}}
    chat = [{"role": "assistant", "content": "x", "tool_calls": [call]}]
    as_text = {"type": "function", "function": {"name": "f", "arguments": '{"q": "<é&\'>"}'}}
    template = make(TOOLS)
    assert template.render(chat) == peer(TOOLS, chat)
    assert template.render([{**chat[0], "tool_calls": [as_text]}]) == peer(TOOLS, chat)


def test_the_rest_of_the_surface(make) -> None:
    assert make("{{ strftime_now('%Y') }}").render(CHAT) == time.strftime("%Y")
    assert make("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}").render(CHAT) == "012"
    assert make("[{{ unknown }}{{ unk_token }}]").render(CHAT) == "[]"


def test_ids_have_special_tokens_only_where_the_template_writes_them(make) -> None:
    ids = to_ids(make(CHATML), CHAT[0]["content"])
    start, end = (TOKENIZER.encode(t, add_special_tokens=False)[0] for t in ("<|im_start|>", "<|im_end|>"))
    assert ids.count(start) == 2
    assert ids.count(end) == 1
    assert TOKENIZER.bos_token_id not in ids


# Content in all its forms


def test_text_parts_join_for_a_template_of_text(make) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = make(CHATML)
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "one\ntwo"}]
    )


def test_parts_reach_a_template_that_reads_parts(make) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = make(PARTS)
    assert template.render([{"role": "user", "content": parts}]) == "user:\none;two;"
    assert template.render([{"role": "user", "content": "one"}]) == "user:\none;"


def test_a_template_that_prints_parts_as_an_object_gets_text(make) -> None:
    template = make("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": [{"type": "text", "text": "one"}]}]) == "one"


def test_null_content_is_empty(make) -> None:
    template = make(CHATML)
    expected = template.render([{"role": "assistant", "content": ""}])
    assert template.render([{"role": "assistant", "content": None}]) == expected
    assert template.render([{"role": "assistant"}]) == expected


@pytest.mark.parametrize(
    "content", [7, {"a": 1}, ["x"], [{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text", "text": 1}]]
)
def test_other_content_is_refused(make, content: object) -> None:
    with pytest.raises(BadRequest) as error:
        make(CHATML).render([{"role": "user", "content": content}])
    assert error.value.param == "messages[0].content"


def test_reasoning_reaches_the_template_under_both_names(make) -> None:
    template = make("{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}")
    assert template.render([{"role": "assistant", "content": "", "reasoning": "a"}]) == "aa"
    assert template.render([{"role": "assistant", "content": "", "reasoning_content": "b"}]) == "bb"


def with_calls(**fields: object) -> dict:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **fields}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("call.function.arguments | tojson", '{"a": "b"}'),
        ("'x' + call.function.arguments", 'x{"a": "b"}'),
        ("'x' ~ call.function.arguments", 'x{"a": "b"}'),
        ("call.function.arguments.a", "b"),
    ],
)
def test_a_calls_arguments_come_as_the_template_can_show_them(make, arguments: str, shown: str) -> None:
    template = make(
        "{% if tools %}{% endif %}{% for m in messages %}{% for call in m.tool_calls or [] %}{{ "
        + arguments
        + " }}{% endfor %}{% endfor %}"
    )
    assert template.render([with_calls()]) == shown


SHOWN_CALLS = (
    "{% if tools %}{% endif %}{% for m in messages %}{% for call in m.tool_calls or [] %}"
    "{{ SHOWN }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("shown", ["call.function.arguments | tojson", "'' + call.function.arguments"])
@pytest.mark.parametrize("arguments", ["", " \n", None, "null", "{}"])
def test_no_arguments_are_an_empty_object(make, shown: str, arguments: str | None) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert make(SHOWN_CALLS.replace("SHOWN", shown)).render([with_calls(tool_calls=[call])]) == "{}"
    described = make(CHATML).render([with_calls(tool_calls=[call])], tools=[{"function": {"name": "f"}}])
    assert '{"name": "f", "arguments": {}}' in described


def test_numbers_of_arguments_keep_their_spelling(make) -> None:
    text = '{"a": 1e400, "b": [1.10, -0, {"c": 12345678901234567890}]}'
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": text}}
    message = with_calls(tool_calls=[call])
    for shown in ("call.function.arguments | tojson", "'' + call.function.arguments"):
        assert make(SHOWN_CALLS.replace("SHOWN", shown)).render([message]) == text
    described = make(CHATML).render([message], tools=[{"function": {"name": "f"}}])
    assert f'{{"name": "f", "arguments": {text}}}' in described
    sums = make(SHOWN_CALLS.replace("SHOWN", "(call.function.arguments.b[0] + 1) ~ call.function.arguments.b[0]"))
    assert sums.render([message]) == "2.11.10"


@pytest.mark.parametrize("text", ["[1.10]", '{"a": 1', "x"])
def test_arguments_that_are_no_object_are_the_text_that_came(make, text: str) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": text}}
    assert make(SHOWN_CALLS.replace("SHOWN", "call.function.arguments")).render([with_calls(tool_calls=[call])]) == text


@pytest.mark.parametrize("name", ["tool_calls", "function_call"])
def test_a_message_with_calls_cannot_be_continued(make, name: str) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "x", name: [call] if name == "tool_calls" else call["function"]}
    for source in (CHATML, TOOLS):
        with pytest.raises(BadRequest, match="the last message calls tools") as error:
            make(source).render([message], add_generation_prompt=False, continue_final_message=True)
        assert error.value.param == "continue_final_message"


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_no_field(make, calls: object) -> None:
    template = make("{% for m in messages %}{{ 'tool_calls' in m }}{% endfor %}")
    assert template.render([{"role": "assistant", "content": "x", "tool_calls": calls}]) == "False"


def test_thoughts_reach_a_template_of_channels_which_shows_one_text_before_a_call(make) -> None:
    template = make(
        "{% for m in messages %}{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('both') }}"
        "{% endif %}"
        "<|channel|>analysis<|message|>{{ m.thinking }}|{{ m.content }}{% endfor %}"
    )
    header = "<|channel|>analysis<|message|>"
    assert template.render([with_calls(reasoning="Hm.", content="I look.")]) == f"{header}Hm.\nI look.|"
    assert template.render([{"role": "assistant", "content": "x", "reasoning": "y"}]) == f"{header}y|x"


@pytest.mark.parametrize("content", ["{{7*7}}{% raw %}{{ cycler.__init__.__globals__ }}", "{# x #}{% endfor %}", "{{"])
def test_message_text_is_never_template(make, content: str) -> None:
    assert content in make(CHATML).render([{"role": "user", "content": content}])


def test_any_text_gives_ids_or_a_bad_request(make) -> None:
    template = make(CHATML)
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    for content in [*specials, *(s * 500 for s in specials), "\x00", "\ufeff", "\u202e", "e" + "\u0301" * 100_000]:
        assert to_ids(template, content)
    with pytest.raises(BadRequest, match="surrogate"):
        to_ids(template, "\ud800")


# Requests that a template cannot serve


def test_the_templates_own_refusal_is_a_bad_request(make) -> None:
    with pytest.raises(BadRequest, match="roles must alternate"):
        make(INST).render([CHAT[0], CHAT[0]])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_failures_are_short_bad_requests_without_the_text(make, source: str) -> None:
    with pytest.raises(BadRequest) as error:
        make(source).render([{"role": "user", "content": "the secret"}])
    assert len(error.value.message) < 300
    assert "secret" not in error.value.message
    assert "/" not in error.value.message


def test_no_messages_and_contradicting_flags_are_refused(make) -> None:
    template = make(CHATML)
    with pytest.raises(BadRequest, match="empty"):
        template.render([])
    with pytest.raises(BadRequest, match="both"):
        template.render(CHAT, continue_final_message=True)
    with pytest.raises(BadRequest, match="last message"):
        make("{{ messages[0].content }}").render(CHAT, add_generation_prompt=False, continue_final_message=True)


def test_variables_of_the_template_can_be_set(make) -> None:
    template = make(CHATML)
    assert template.variables == {"enable_thinking"}
    assert "<think>" not in template.render(CHAT)
    assert "<think>" in template.render(CHAT, kwargs={"enable_thinking": False})
    defaults = make(CHATML, default_kwargs={"enable_thinking": False})
    assert "<think>" in defaults.render(CHAT)
    assert "<think>" not in defaults.render(CHAT, kwargs={"enable_thinking": True})


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "tokenizer", "__class__", "messages", "tools", "bos_token", "unk_token",
     "add_generation_prompt", "_x"],
)  # fmt: skip
def test_what_the_server_sets_cannot_be_set(make, name: str) -> None:
    reads_everything = (
        CHATML + "{{ chat_template }}{{ tokenize }}{{ tokenizer }}{{ __class__ }}{{ unk_token }}{{ _x }}{{ range }}"
    )
    with pytest.raises(BadRequest) as error:
        make(reads_everything).render(CHAT, kwargs={name: "x"})
    assert error.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("name", ["other", "raise_exception", "range", "strftime_now"])
def test_names_that_the_template_does_not_read_have_no_effect(make, name: str) -> None:
    template = make(CHATML + "{{ range(2) | list }}{{ strftime_now('%Y') }}")
    assert template.render(CHAT, kwargs={name: "x"}) == template.render(CHAT)
    assert template.unnamed(CHAT, {name: "x", "enable_thinking": False})["variable"] == [name]


TOOL_TALK = [
    {"role": "developer", "content": "be"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"q": 1}'}}]},
    {"role": "tool", "content": "1", "tool_call_id": "a"},
    {"role": "critic", "content": "no"},
]
AGENT = """\
{% for m in messages %}{% if m['role'] == 'tool' %}<{{ m.content }}>{% elif m.role in ['developer', 'critic'] %}
[{{ m.role }}]{% elif m.tool_calls %}{{ m.tool_calls[0].function.arguments.q }}{% endif %}{% endfor %}"""


def test_what_the_template_does_not_name_is_found(make) -> None:
    nothing = {"variable": [], "role": [], "field": []}
    assert make(CHATML).unnamed(CHAT, {}) == nothing
    assert make(CHATML).unnamed(TOOL_TALK, {}) == {"variable": [], "role": ["tool", "critic"], "field": ["tool_calls"]}
    assert make(AGENT).unnamed(TOOL_TALK, {}) == nothing


def test_a_template_gets_the_roles_that_it_knows(make) -> None:
    assert make(AGENT).render(TOOL_TALK).replace("\n", "") == "[developer]1<1>[critic]"
    assert (
        make(CHATML).render(TOOL_TALK).startswith("<|im_start|>system\nbe<|im_end|>\n<|im_start|>assistant\n<|im_end|>")
    )


def test_defaults_that_the_template_does_not_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="enable_thinkin'"):
        ChatTemplate(CHATML, TOKENIZER, {"enable_thinkin": False})


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | no_such_filter }}", "{% endfor %}"])
def test_a_template_that_does_not_compile_is_a_load_error(source: str) -> None:
    with pytest.raises(ModelLoadError, match="does not compile"):
        ChatTemplate(source, TOKENIZER)


def test_a_template_of_a_name_is_chosen_for_tools_and_by_its_name(make) -> None:
    usual = make("usual{{ mood }}", default_kwargs={"mood": "!", "style": "?"}, variants={
        "tool_use": "tools{{ tools | length }}{{ style }}", "rag": "texts",
    })  # fmt: skip
    text = [{"role": "user", "content": "hi"}]
    for asked, expected in (
        ({}, "usual!"),
        ({"has_tools": True}, "tools1?"),
        ({"has_tools": True, "name": "default"}, "usual!"),
        ({"name": "tool_use"}, "tools1?"),
        ({"name": "rag"}, "texts"),
    ):
        assert usual.chosen(**asked).render(text, tools=[{"type": "function"}]).startswith(expected)
    with pytest.raises(BadRequest, match="here 'default', 'tool_use', 'rag'; requests cannot bring") as error:
        usual.chosen(name="{{ 1 }}")
    assert error.value.param == "chat_template"
    assert len(usual.processes) == 6
    assert make("usual").chosen(has_tools=True).name == "default"


def test_a_variant_that_does_not_compile_is_named() -> None:
    with pytest.raises(ModelLoadError, match="the chat template 'rag' does not compile"):
        ChatTemplate("x", TOKENIZER, variants={"rag": "{% for %}"})


# Limits

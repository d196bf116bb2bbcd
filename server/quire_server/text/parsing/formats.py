"""The formats in which models write tool calls and reasoning: by name, and by detection from the chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from quire_engine.contract.errors import ConfigError
from quire_server.text.parsing.coded import FUNCTION_GEMMA, GEMMA_4, OLMO, PYTHONIC
from quire_server.text.parsing.harmony import HARMONY
from quire_server.text.parsing.json_call import read_call, read_calls, read_value
from quire_server.text.parsing.marked import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GRANITE,
    GRANITE_20B,
    JAMBA,
    KIMI_K2,
    MINIMAX,
)
from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.reasoning import ThinkingMarks, detect_reasoning, reasoning_format
from quire_server.text.parsing.source import Markers, Source, Steps
from quire_server.text.parsing.tagged import DEEPSEEK_V4, DEEPSEEK_V32, GLM, MINIMAX_M2, QWEN_XML, SEED_OSS
from quire_server.text.parsing.tool_format import ToolFormat, mistral_id
from quire_server.text.tokenizer import TextTokenizer

_HERMES_OPEN, _HERMES_CLOSE = "<tool_call>", "</tool_call>"
_HERMES_OPENED, _HERMES_CLOSED = Markers(_HERMES_OPEN), Markers(_HERMES_CLOSE)


def _read_hermes(source: Source, reply: ParsedReply) -> Steps[None]:
    """Calls as Hermes and Qwen models write them: <tool_call>, a JSON object, </tool_call>.

    Text between the tags that is not a call is content, with its tags.
    """
    while (yield from source.until(_HERMES_OPENED, reply.content)):
        space = yield from source.space()
        outcome = yield from read_call(source, reply, sure=True)
        if outcome == "call":
            yield from _read_hermes_close(source, reply)
        elif outcome == "broken":
            yield from source.until(_HERMES_CLOSED, _ignore)
        else:
            reply.content(_HERMES_OPEN + space + source.kept())


def _read_hermes_close(source: Source, reply: ParsedReply) -> Steps[None]:
    """The closing tag. Small models write a brace too many before it, and some models omit it."""
    space = yield from source.space()
    while (yield from source.peek()) == "}":
        source.take()
        space = yield from source.space()
    if not (yield from source.literal(_HERMES_CLOSE)):
        reply.content(space)


def _ignore(text: str) -> None:
    """Drops the rest of a broken call."""


HERMES = ToolFormat(
    name="hermes",
    read=_read_hermes,
    markers=(_HERMES_OPEN, _HERMES_CLOSE),
    opener=_HERMES_OPEN,
    before_name=f'{_HERMES_OPEN}\n{{"name": ',
    between_name_and_arguments=', "arguments": ',
    after_call=f"}}\n{_HERMES_CLOSE}",
    separator="\n",
)


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_STOPS = Markers("\n", _LLAMA_TAG)


def _read_llama(source: Source, reply: ParsedReply) -> Steps[None]:
    """Calls as Llama 3 models write them: a JSON object with "parameters", alone or after <|python_tag|>.

    Several objects are separated by ";". An object without the tag is a call where it begins a line or follows a call,
    names a tool and has no keys but those of calls; any other JSON is an answer.
    """
    stop = "\n"  # the start of the text counts as the start of a line
    while stop:
        if stop == _LLAMA_TAG:
            before = _LLAMA_TAG + (yield from source.space())
            if (yield from source.peek()) == "{":
                yield from _read_llama_calls(source, reply, before, sure=True)
            else:
                reply.content(before)
        else:
            yield from source.show_space(reply.content)
            if (yield from source.peek()) == "{":
                yield from _read_llama_calls(source, reply, "", sure=False)
        stop = yield from source.until(_LLAMA_STOPS, reply.content)
        if stop == "\n":
            reply.content(stop)


def _read_llama_calls(source: Source, reply: ParsedReply, before: str, *, sure: bool) -> Steps[None]:
    while True:
        outcome = yield from read_call(source, reply, sure=sure)
        if outcome == "none":
            reply.content(before + source.kept())
        if outcome != "call":
            return
        before = yield from source.space()
        if (yield from source.literal(";")):
            before += ";" + (yield from source.space())
        char = yield from source.peek()
        if char != "{":
            reply.content(before if char else "")
            return


LLAMA = ToolFormat(
    name="llama3_json",
    read=_read_llama,
    markers=(_LLAMA_TAG,),
    before_name='{"name": ',
    between_name_and_arguments=', "parameters": ',
    after_call="}",
    separator="; ",
)


_MISTRAL_CALLS, _MISTRAL_ID, _MISTRAL_ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_OPENED = Markers(_MISTRAL_CALLS)
_MISTRAL_NAME = re.compile(r"[^\s\[\]{}()\"<>]+")


def _read_mistral(source: Source, reply: ParsedReply) -> Steps[None]:
    """Calls as Mistral models write them, after [TOOL_CALLS]: an array of JSON objects, or name[ARGS]{...}.

    Models since 2025 write the second form and repeat the marker before each call. Both are read for every model.
    """
    while (yield from source.until(_MISTRAL_OPENED, reply.content)):
        before = _MISTRAL_CALLS + (yield from source.space())
        if (yield from source.peek()) in {"[", "{"}:
            yield from read_calls(source, reply, before, sure=True)
        else:
            yield from _read_mistral_named(source, reply, before)


def _read_mistral_named(source: Source, reply: ParsedReply, before: str) -> Steps[None]:
    """The model's own ids are dropped: it may repeat them, and a history needs unique ones."""
    source.keep()
    name = yield from source.run(_MISTRAL_NAME)
    if (yield from source.literal(_MISTRAL_ID)):
        yield from source.run(_MISTRAL_NAME)
    yield from source.literal(_MISTRAL_ARGS)
    yield from source.space()
    if not name or (yield from source.peek()) != "{":
        reply.fail("A call is not written as calls are.")
        reply.content(before + source.kept())
        return
    source.kept()
    reply.begin_call(name)
    yield from read_value(source, reply.arguments)
    reply.end_call()


MISTRAL = ToolFormat(
    name="mistral",
    read=_read_mistral,
    markers=(_MISTRAL_CALLS, _MISTRAL_ARGS, _MISTRAL_ID),
    opener=_MISTRAL_CALLS,
    new_id=mistral_id,
    begin=f"{_MISTRAL_CALLS}[",
    before_name='{"name": ',
    between_name_and_arguments=', "arguments": ',
    after_call="}",
    separator=", ",
    end="]",
)
MISTRAL_ARGS = replace(
    MISTRAL,
    name="mistral_args",
    begin="",
    before_name=_MISTRAL_CALLS,
    bare_name=True,
    between_name_and_arguments=_MISTRAL_ARGS,
    after_call="",
    separator="",
    end="",
)


_LINE_END = Markers("\n")


def _read_plain(source: Source, reply: ParsedReply) -> Steps[None]:
    """Calls as plain JSON, for models without a format of their own: an array of calls, or one call.

    A grammar forces it, or the prompt asks for it. JSON is a call if it begins a line, names a tool and has only keys
    of calls; other JSON is an answer.
    """
    line_end = "\n"
    while line_end:
        yield from source.show_space(reply.content)
        if (yield from source.peek()) in {"[", "{"}:
            yield from read_calls(source, reply, "", sure=False)
        line_end = yield from source.until(_LINE_END, reply.content)
        reply.content(line_end)


FORCED = ToolFormat(
    name="json",
    read=_read_plain,
    begin="[",
    before_name='{"name": ',
    between_name_and_arguments=', "arguments": ',
    after_call="}",
    separator=", ",
    end="]",
)


AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """The formats of one model's reasoning and calls.

    By default: reasoning is not parsed, and calls are plain JSON.
    """

    calls: ToolFormat = FORCED
    marks: ThinkingMarks | None = None
    calls_markers: frozenset[int] = frozenset()  # tokens that the parser needs, also if they are special
    marks_ids: frozenset[int] = frozenset()

    def shown_ids(self, *, reads_calls: bool) -> frozenset[int]:
        """Special tokens that the parser of a reply needs."""
        return self.calls_markers | self.marks_ids if reads_calls else self.marks_ids


PLAIN = ModelFormats()


def model_formats(calls: str, reasoning: str, tokenizer: TextTokenizer, template: str | None) -> ModelFormats:
    """The formats from the settings of these names; "auto" detects them from the chat template. Raises ConfigError."""
    form = tool_format(calls) if calls != AUTO else detect_tool_format(template or "")
    marks: ThinkingMarks | None = None
    if reasoning == AUTO:
        found = detect_reasoning(template, tokenizer.token_id) if template is not None else None
        marks = None if found is None else found.marks(tokenizer.token_id)
    elif reasoning != NONE:
        marks = reasoning_format(reasoning).marks(tokenizer.token_id)
    form = form or FORCED
    if marks is not None and marks.before_answer and calls == AUTO:
        form = HARMONY
    elif form is HARMONY and reasoning == AUTO:
        marks = reasoning_format("openai_gptoss").marks(tokenizer.token_id)
    return ModelFormats(
        calls=form,
        marks=marks,
        calls_markers=_ids(form.markers, tokenizer),
        marks_ids=_ids(marks.markers, tokenizer) if marks is not None else frozenset(),
    )


def _ids(markers: Iterable[str], tokenizer: TextTokenizer) -> frozenset[int]:
    found_ids = (tokenizer.token_id(marker) for marker in markers)
    return frozenset(token_id for token_id in found_ids if token_id is not None)


_FORMATS = (
    HERMES, QWEN_XML, LLAMA, MISTRAL, MISTRAL_ARGS, FORCED, HARMONY, GEMMA_4, FUNCTION_GEMMA, GLM, DEEPSEEK_V3,
    DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4, KIMI_K2, GRANITE, GRANITE_20B, PYTHONIC, OLMO, MINIMAX, MINIMAX_M2,
    SEED_OSS, JAMBA,
)  # fmt: skip
TOOL_FORMATS = {
    **{form.name: form for form in _FORMATS},
    "qwen": HERMES,
    "granite4": HERMES,
    "llama4_json": LLAMA,
    "llama4_pythonic": PYTHONIC,
    "qwen3_xml": QWEN_XML,
    "mimo": QWEN_XML,
    "step3p5": QWEN_XML,
    "glm47": GLM,
    "hunyuan_a13b": JAMBA,
}


def tool_format(name: str) -> ToolFormat:
    """The format with that name. Raises ConfigError."""
    if name not in TOOL_FORMATS:
        raise ConfigError(f"tool call parser {name!r} is unknown; known are {', '.join(sorted(TOOL_FORMATS))}")
    return TOOL_FORMATS[name]


def detect_tool_format(template: str) -> ToolFormat | None:
    """The format that the chat template shows the model; None if it has none, or an unknown one."""
    if "<|channel|>analysis" in template:  # the whole reply's format, with tools or without
        return HARMONY
    if "tools" not in template:
        return None
    for is_taught, form in (
        ("<seed:tool_call>" in template, SEED_OSS),
        ("<minimax:tool_call>" in template, MINIMAX_M2),
        ("<function=" in template, QWEN_XML),
        ("<arg_key>" in template, GLM),
        ("｜DSML｜" in template and "function_calls>" in template, DEEPSEEK_V32),
        ("｜DSML｜" in template, DEEPSEEK_V4),
        ("<｜tool▁calls▁begin｜>" in template and "```json" in template, DEEPSEEK_V3),
        ("<｜tool▁calls▁begin｜>" in template, DEEPSEEK_V31),
        ("<|tool_calls_section_begin|>" in template, KIMI_K2),
        ("<|tool_call>call:" in template, GEMMA_4),
        ("<start_function_call>call:" in template, FUNCTION_GEMMA),
        ("<function_calls>" in template, OLMO),
        ("<tool_call>" in template, HERMES),
        ("<tool_calls>" in template and "[{" not in template, MINIMAX),
        ("<tool_calls>" in template, JAMBA),
        ("<|tool_call|>" in template, GRANITE),
        ("<function_call>" in template, GRANITE_20B),
        ("[TOOL_CALLS]" in template and "[ARGS]" in template, MISTRAL_ARGS),
        ("[TOOL_CALLS] [" in template, replace(MISTRAL, begin="[TOOL_CALLS] [")),
        ("[TOOL_CALLS]" in template, MISTRAL),
        (_SHOWS_PYTHON.search(template) is not None, PYTHONIC),
        ("python_tag" in template or ('"parameters": ' in template and "<|eot" in template), LLAMA),
    ):
        if is_taught:
            return form
    return None


_SHOWS_PYTHON = re.compile(r"\[func\w*\(param\w*=")  # as in [func_name1(params_name1=params_value1)]

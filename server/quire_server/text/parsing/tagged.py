"""Calls with a tag for each argument, in the tags of Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2 and others.

Promises: values become JSON by their tool's schema; strings are passed on as they come. The tag that ends a value
counts where another parameter, the call's end or the text's end follows; elsewhere it is a part of the value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from quire_server.text.parsing.parsed_reply import ParsedReply, read_json
from quire_server.text.parsing.source import Markers, Show, Source, Steps
from quire_server.text.parsing.tool_format import Parameters, ToolFormat

_NAME = re.compile(r"[^<>\s\"]+")
_PARAMETER_NAME = re.compile(r"[^<>\"]+")
_KINDS = {str: {"string"}, bool: {"boolean"}, type(None): {"null"}, dict: {"object"}, list: {"array"}}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, kw_only=True)
class _Tags:
    """The tags of one format. Whitespace between tags has no meaning."""

    outer: tuple[str, str]  # around one or more calls; some models omit them
    call: tuple[str, str, str]  # before a call's name, after it, after the call; empty: the outer tags are the call's
    parameter: str  # before a parameter's name
    named: tuple[str, ...]  # the tags between a parameter's name and its value
    end_parameter: str
    says_type: bool = False  # whether "true" or "false" and '">' follow: whether the value is a string
    holds_several: bool = False  # whether several calls are written between the outer tags
    pads: bool = False  # whether values have a line break on each side that is not part of them

    @cached_property
    def opened(self) -> Markers:
        return Markers(*filter(None, (self.outer[0], self.call[0])))

    @cached_property
    def next(self) -> Markers:
        return Markers(*filter(None, (self.parameter, self.call[2], self.outer[1])))

    @cached_property
    def end_value(self) -> Markers:
        return Markers(self.end_parameter)


def _read(source: Source, reply: ParsedReply, *, tags: _Tags) -> Steps[None]:
    before_name, after_name, _ = tags.call
    while marker := (yield from source.until(tags.opened, reply.content)):
        source.keep()
        if marker == tags.outer[0]:
            yield from source.space()
        begins = marker == before_name or (yield from source.literal(before_name))
        name = (yield from source.run(_NAME)) if begins else ""
        is_call = name != "" and (yield from source.literal(after_name))
        if is_call and not before_name:  # only the next tag tells a call's name from text
            yield from source.space()
            is_call = (yield from source.peek()) == "<"
        if not is_call:
            reply.fail("A call is not written as calls are.")
            reply.content(marker + source.kept())
            continue
        source.kept()
        reply.begin_call(name)
        yield from _read_arguments(source, reply, name, tags)
        reply.end_call()
        yield from source.closing((tags.outer[1],), reply.content)


def _read_arguments(source: Source, reply: ParsedReply, tool: str, tags: _Tags) -> Steps[None]:
    separator = "{"
    while (marker := (yield from source.until(tags.next, _ignore))) == tags.parameter:
        name = (yield from source.run(_PARAMETER_NAME)).strip()
        for number, tag in enumerate(tags.named):
            if number:
                yield from source.space()
            yield from source.literal(tag)
        reply.arguments(f"{separator}{_dumps(name)}: ")
        separator = ", "
        if tags.says_type:
            kinds = {"string"} if (yield from source.run(_NAME)) == "true" else set()
            yield from source.literal('">')
        else:
            kinds = kinds_of_schema(_schema(reply, tool, name))
        if not (yield from _read_value(source, reply.arguments, kinds, tags)):
            return
    if marker:
        reply.arguments("{}" if separator == "{" else "}")


def _read_value(source: Source, show: Show, kinds: set[str], tags: _Tags) -> Steps[bool]:
    """Whether the value is complete."""
    if kinds == {"string"}:
        text = _StringText(show, pads=tags.pads)
        if is_whole := (yield from _show_value(source, text.push, tags)):
            show('"')
        return is_whole
    pieces: list[str] = []
    if is_whole := (yield from _show_value(source, pieces.append, tags)):
        value = "".join(pieces)
        show(_as_json(value.removeprefix("\n").removesuffix("\n") if tags.pads else value, kinds))
    return is_whole


def _show_value(source: Source, show: Show, tags: _Tags) -> Steps[bool]:
    """Show the text up to the tag that ends the value, and consume that; False where the text ends before it."""
    while (yield from source.until(tags.end_value, show)):
        space = yield from source.space()
        if (yield from source.precedes(tags.next)):
            return True
        show(tags.end_parameter + space)
    return False


class _StringText:
    """Encodes a text as a JSON string while it arrives."""

    def __init__(self, show: Show, *, pads: bool) -> None:
        self._show = show
        self._pads = pads
        self._has_begun = False
        self._line_break = ""  # part of the text if more follows
        show('"')

    def push(self, text: str) -> None:
        if self._pads:
            if not self._has_begun:
                self._has_begun = True
                text = text.removeprefix("\n")
            text = self._line_break + text
            body = text.removesuffix("\n")
            self._line_break = text[len(body) :]
            text = body
        self._show(_dumps(text)[1:-1])


def _as_json(text: str, kinds: set[str]) -> str:
    """The value as one of the types that its schema allows; otherwise as a string."""
    stripped = text.strip()
    stripped = _PYTHON_NAMES.get(stripped, stripped)
    try:
        value = read_json(stripped)
    except ValueError:
        return _dumps(text)
    allowed = not kinds or not kinds.isdisjoint(_kinds_of(value))
    return stripped if allowed else _dumps(text)


def _kinds_of(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == value // 1 else {"number"}
    return _KINDS[type(value)]


def _schema(reply: ParsedReply, tool: str, parameter: str) -> object:
    known = reply.tools.get(tool) or {}
    properties = known.get("properties")
    return properties.get(parameter) if isinstance(properties, Mapping) else None


def kinds_of_schema(schema: object, depth: int = 3) -> set[str]:
    """The JSON types that a schema names; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    enum, others = schema.get("enum"), [schema.get("anyOf"), schema.get("oneOf")]
    for value in [*(enum if isinstance(enum, list) else []), *([schema["const"]] if "const" in schema else [])]:
        kinds |= _kinds_of(value)
    for other in (branch for branches in others if isinstance(branches, list) and depth for branch in branches):
        kinds |= kinds_of_schema(other, depth - 1)
    return kinds


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _ignore(text: str) -> None:
    """Drops text between parameters."""


def _tagged(name: str, tags: _Tags, parameters: Parameters, *, markers: tuple[str, ...] = ()) -> ToolFormat:
    outer, end_outer = tags.outer
    before_name, after_name, after_call = tags.call
    form = ToolFormat(
        name=name,
        read=partial(_read, tags=tags),
        markers=(*tags.outer, *markers),
        opener=outer,
        writes_json=False,
        parameters=parameters,
        bare_name=True,
        between_name_and_arguments=f"{after_name}\n",
    )
    if tags.holds_several:
        return replace(form, begin=f"{outer}\n", before_name=before_name, after_call=f"{after_call}\n", end=end_outer)
    before = f"{outer}\n{before_name}" if before_name else outer
    after = f"{after_call}\n{end_outer}" if after_call else end_outer
    return replace(form, before_name=before, after_call=after, separator="\n")


def _qwen(name: str, outer: tuple[str, str]) -> ToolFormat:
    return _tagged(
        name,
        _Tags(
            outer=outer,
            call=("<function=", ">", "</function>"),
            parameter="<parameter=",
            named=(">",),
            end_parameter="</parameter>",
            pads=True,
        ),
        Parameters(before="<parameter=", named=">\n", after="\n</parameter>\n"),
    )


def _dsml(name: str, outer: str) -> ToolFormat:
    """DeepSeek's own markup, with the type of each argument in its tag."""
    return _tagged(
        name,
        _Tags(
            outer=(f"<｜DSML｜{outer}>", f"</｜DSML｜{outer}>"),
            call=('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
            parameter='<｜DSML｜parameter name="',
            named=('" string="',),
            end_parameter="</｜DSML｜parameter>",
            says_type=True,
            holds_several=True,
        ),
        Parameters(
            before='<｜DSML｜parameter name="',
            named='" string="true">',
            named_other='" string="false">',
            after="</｜DSML｜parameter>\n",
        ),
        markers=("｜DSML｜",),
    )


QWEN_XML = _qwen("qwen3_coder", ("<tool_call>", "</tool_call>"))
SEED_OSS = _qwen("seed_oss", ("<seed:tool_call>", "</seed:tool_call>"))
GLM = _tagged(
    "glm45",
    _Tags(
        outer=("<tool_call>", "</tool_call>"),
        call=("", "", ""),
        parameter="<arg_key>",
        named=("</arg_key>", "<arg_value>"),
        end_parameter="</arg_value>",
    ),
    Parameters(before="<arg_key>", named="</arg_key>\n<arg_value>", after="</arg_value>\n"),
    markers=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
MINIMAX_M2 = _tagged(
    "minimax_m2",
    _Tags(
        outer=("<minimax:tool_call>", "</minimax:tool_call>"),
        call=('<invoke name="', '">', "</invoke>"),
        parameter='<parameter name="',
        named=('">',),
        end_parameter="</parameter>",
        holds_several=True,
    ),
    Parameters(before='<parameter name="', named='">', after="</parameter>\n"),
)
DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")

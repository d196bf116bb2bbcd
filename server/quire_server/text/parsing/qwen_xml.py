"""Calls as Qwen3-Coder models write them: <function=name>, a <parameter=name> for each argument, in <tool_call>.

Promises: values become JSON by their tool's schema; strings are passed on as they come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from quire_server.text.parsing.parsed_reply import ParsedReply, read_json
from quire_server.text.parsing.source import Markers, Show, Source, Steps
from quire_server.text.parsing.tool_format import ToolFormat

_OPEN, _CLOSE, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_OPENED = Markers(_OPEN, _FUNCTION)  # some models omit the outer tag
_PARAMETER, _END_FUNCTION = "<parameter=", "</function>"
_NEXT = Markers(_PARAMETER, _END_FUNCTION, _CLOSE)
_END_PARAMETER = Markers("</parameter>")
_NAME = re.compile(r"[^<>\s]+")
_KINDS = {str: {"string"}, bool: {"boolean"}, type(None): {"null"}, dict: {"object"}, list: {"array"}}
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def _read(source: Source, reply: ParsedReply) -> Steps[None]:
    while marker := (yield from source.until(_OPENED, reply.content)):
        source.keep()
        if marker == _OPEN:
            yield from source.space()
        is_function = marker == _FUNCTION or (yield from source.literal(_FUNCTION))
        name = (yield from source.run(_NAME)) if is_function else ""
        if not name or not (yield from source.literal(">")):
            reply.fail("A call is not written as calls are.")
            reply.content(marker + source.kept())
            continue
        source.kept()
        reply.begin_call(name)
        yield from _read_arguments(source, reply, name)
        reply.end_call()
        if marker == _OPEN:
            yield from source.space()
            yield from source.literal(_CLOSE)


def _read_arguments(source: Source, reply: ParsedReply, tool: str) -> Steps[None]:
    separator = "{"
    while (marker := (yield from source.until(_NEXT, _ignore))) == _PARAMETER:
        name = yield from source.run(_NAME)
        yield from source.literal(">")
        reply.arguments(f"{separator}{_dumps(name)}: ")
        separator = ", "
        kinds = _kinds(_schema(reply, tool, name))
        if not (yield from _read_value(source, reply.arguments, kinds)):
            return
    if marker:
        reply.arguments("{}" if separator == "{" else "}")


def _read_value(source: Source, show: Show, kinds: set[str]) -> Steps[bool]:
    """Whether the value is complete. The line breaks next to its tags are not part of it."""
    if kinds == {"string"}:
        text = _StringText(show)
        found = yield from source.until(_END_PARAMETER, text.push)
        if found:
            show('"')
        return found != ""
    pieces: list[str] = []
    found = yield from source.until(_END_PARAMETER, pieces.append)
    if found:
        show(_as_json("".join(pieces).removeprefix("\n").removesuffix("\n"), kinds))
    return found != ""


class _StringText:
    """Encodes a text as a JSON string while it arrives."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._has_begun = False
        self._line_break = ""  # part of the text if more follows
        show('"')

    def push(self, text: str) -> None:
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        text = self._line_break + text
        body = text.removesuffix("\n")
        self._line_break = text[len(body) :]
        self._show(_dumps(body)[1:-1])


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


def _kinds(schema: object, depth: int = 3) -> set[str]:
    """The JSON types that a schema names; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    enum, others = schema.get("enum"), [schema.get("anyOf"), schema.get("oneOf")]
    for value in [*(enum if isinstance(enum, list) else []), *([schema["const"]] if "const" in schema else [])]:
        kinds |= _kinds_of(value)
    for other in (branch for branches in others if isinstance(branches, list) and depth for branch in branches):
        kinds |= _kinds(other, depth - 1)
    return kinds


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _ignore(text: str) -> None:
    """Drops text between parameters."""


QWEN_XML = ToolFormat(
    name="qwen3_coder", read=_read, markers=(_OPEN, _CLOSE), opener=_OPEN, separator="\n", writes_json=False
)

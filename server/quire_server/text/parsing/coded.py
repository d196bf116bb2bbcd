"""Calls that look like code: Python's, as Llama 3.2, Llama 4, Gemma 3 and OLMo 3 write them, and Gemma 4's own.

Promises: arguments become JSON as they come.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property, partial

from quire_server.text.parsing.json_call import Outcome
from quire_server.text.parsing.literals import PYTHON, Notation, delimited, read_literal
from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Markers, Source, Steps
from quire_server.text.parsing.tool_format import Parameters, ToolFormat

_NAME = re.compile(r"[\w.-]+")
_BAD_CALL = "A call is not written as calls are."


def _read_python_call(source: Source, reply: ParsedReply, before: str, *, sure: bool) -> Steps[Outcome]:
    """Read `name(key=value, ...)`. Text that is not a call is content, after `before`.

    `sure`: only calls can stand here. Otherwise a call is one of a known tool.
    """
    source.keep()
    name = yield from source.run(_NAME)
    yield from source.space()
    if not name or not (sure or name in reply.tools) or not (yield from source.literal("(")):
        if sure and (name or (yield from source.peek())):
            reply.fail(_BAD_CALL)
        reply.content(before + source.kept())
        return "none"
    source.kept()
    reply.begin_call(name)
    is_complete = yield from _read_keywords(source, reply)
    reply.end_call()
    return "call" if is_complete else "broken"


def _read_keywords(source: Source, reply: ParsedReply) -> Steps[bool]:
    separator = "{"
    while True:
        yield from source.space()
        if (yield from source.literal(")")):
            reply.arguments("{}" if separator == "{" else "}")
            return True
        key = yield from source.run(_NAME)
        yield from source.space()
        if not key or not (yield from source.literal("=")):
            return False
        reply.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from read_literal(source, reply.arguments, PYTHON)):
            return False
        yield from source.space()
        if not (yield from source.literal(",")) and (yield from source.peek()) != ")":
            return False


_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_STOPS = Markers("\n", _PYTHON_START)


def _read_pythonic(source: Source, reply: ParsedReply) -> Steps[None]:
    """Calls as a Python list at the start of a line: [get_weather(city="Paris"), get_time()]. Other text is content.

    Llama 4 may write it between <|python_start|> and <|python_end|>.
    """
    stop = "\n"  # the start of the text counts as the start of a line
    while stop:
        before = stop if stop == _PYTHON_START else ""
        if before:
            before += yield from source.space()
        else:
            yield from source.show_space(reply.content)
        if (yield from source.literal("[")):
            yield from _read_python_list(source, reply, before + "[")
            if before:
                yield from source.closing((_PYTHON_END,), reply.content)
        else:
            reply.content(before)
        stop = yield from source.until(_STOPS, reply.content)
        if stop == "\n":
            reply.content(stop)


def _read_python_list(source: Source, reply: ParsedReply, before: str) -> Steps[None]:
    while True:
        before += yield from source.space()
        if (yield from _read_python_call(source, reply, before, sure=False)) != "call":
            return
        before = yield from source.space()
        if not (yield from source.literal(",")):
            if not (yield from source.literal("]")):
                reply.content(before)
            return
        before += ","
        before += yield from source.space()
        if (yield from source.literal("]")):
            return


_KEYWORDS = Parameters(named="=", separator=", ", quotes=True)
PYTHONIC = ToolFormat(
    name="pythonic",
    read=_read_pythonic,
    markers=(_PYTHON_START, _PYTHON_END),
    writes_json=False,
    parameters=_KEYWORDS,
    begin="[",
    bare_name=True,
    between_name_and_arguments="(",
    after_call=")",
    separator=", ",
    end="]",
)


_CALLS, _END_CALLS = "<function_calls>", "</function_calls>"
_CALLS_OPENED, _CALLS_CLOSED = Markers(_CALLS), Markers(_END_CALLS)


def _read_olmo(source: Source, reply: ParsedReply) -> Steps[None]:
    """Calls as OLMo 3 writes them: <function_calls>, a Python call on each line, </function_calls>."""
    while (yield from source.until(_CALLS_OPENED, reply.content)):
        before = _CALLS + (yield from source.space())
        while (outcome := (yield from _read_python_call(source, reply, before, sure=True))) == "call":
            before = yield from source.space()
            if (yield from source.literal(_END_CALLS)):
                break
        if outcome == "broken":
            yield from source.until(_CALLS_CLOSED, _ignore)


OLMO = ToolFormat(
    name="olmo3",
    read=_read_olmo,
    markers=(_CALLS, _END_CALLS),
    opener=_CALLS,
    writes_json=False,
    parameters=_KEYWORDS,
    begin=f"{_CALLS}\n",
    bare_name=True,
    between_name_and_arguments="(",
    after_call=")",
    separator="\n",
    end=f"\n{_END_CALLS}",
)


@dataclass(frozen=True, kw_only=True)
class _Marks:
    before: str
    after: str
    quote: str

    @cached_property
    def opened(self) -> Markers:
        return Markers(self.before)

    @cached_property
    def closed(self) -> Markers:
        return Markers(self.after)

    @cached_property
    def notation(self) -> Notation:
        return delimited(self.quote)


def _read_gemma(source: Source, reply: ParsedReply, *, marks: _Marks) -> Steps[None]:
    """Calls as Gemma models write them: call:name{key:value,...} between two marks."""
    while (yield from source.until(marks.opened, reply.content)):
        source.keep()
        yield from source.space()
        name = (yield from source.run(_NAME)) if (yield from source.literal("call:")) else ""
        yield from source.space()
        if not name or (yield from source.peek()) != "{":
            reply.fail(_BAD_CALL)
            reply.content(marks.before + source.kept())
            continue
        source.kept()
        reply.begin_call(name)
        is_complete = yield from read_literal(source, reply.arguments, marks.notation)
        reply.end_call()
        if is_complete:
            yield from source.closing((marks.after,), reply.content)
        else:
            yield from source.until(marks.closed, _ignore)


def _gemma(name: str, marks: _Marks) -> ToolFormat:
    return ToolFormat(
        name=name,
        read=partial(_read_gemma, marks=marks),
        markers=(marks.before, marks.after, marks.quote),
        opener=marks.before,
        writes_json=False,
    )


GEMMA_4 = _gemma("gemma4", _Marks(before="<|tool_call>", after="<tool_call|>", quote='<|"|>'))
FUNCTION_GEMMA = _gemma(
    "functiongemma", _Marks(before="<start_function_call>", after="<end_function_call>", quote="<escape>")
)


def _ignore(text: str) -> None:
    """Drops the rest of a broken call."""

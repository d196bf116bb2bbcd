"""Calls with arguments in JSON between marks of their own: DeepSeek V3's, Kimi K2's, Granite's and others."""

from __future__ import annotations

import re
from functools import partial

from quire_server.text.parsing.json_call import read_calls, read_value
from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Markers, Source, Steps
from quire_server.text.parsing.tool_format import ToolFormat

_NAME = re.compile(r"[^\s<>\"`{}]+")
_BAD_CALL = "A call is not written as calls are."

_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALLS_OPENED = Markers(_CALLS, _CALL)
_FENCE = "```"


def _read_deepseek(source: Source, reply: ParsedReply) -> Steps[None]:
    """Calls as DeepSeek models write them: V3 with a type, the name and JSON in a fence; V3.1 the name and JSON."""
    while marker := (yield from source.until(_CALLS_OPENED, reply.content)):
        source.keep()
        if marker == _CALLS:
            yield from source.space()
        is_call = marker == _CALL or (yield from source.literal(_CALL))
        yield from source.space()
        name = (yield from source.run(_NAME)) if is_call else ""
        yield from source.space()
        is_call = name != "" and (yield from source.literal(_SEP))
        yield from source.space()
        if is_call and (yield from source.peek()) != "{":
            name = yield from source.run(_NAME)
            yield from source.space()
            if (yield from source.literal(_FENCE)):
                yield from source.literal("json")
            yield from source.space()
        if not is_call or not name or (yield from source.peek()) != "{":
            reply.fail(_BAD_CALL)
            reply.content(marker + source.kept())
            continue
        source.kept()
        reply.begin_call(name)
        yield from read_value(source, reply.arguments)
        reply.end_call()
        yield from source.closing((_FENCE, _END_CALL, _END_CALLS), reply.content)


DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    read=_read_deepseek,
    markers=(_CALLS, _END_CALLS, _CALL, _SEP, _END_CALL),
    opener=_CALLS,
    begin=_CALLS,
    before_name=_CALL,
    bare_name=True,
    between_name_and_arguments=_SEP,
    after_call=_END_CALL,
    end=_END_CALLS,
)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    read=_read_deepseek,
    markers=DEEPSEEK_V31.markers,
    opener=_CALLS,
    begin=_CALLS,
    before_name=f"{_CALL}function{_SEP}",
    bare_name=True,
    between_name_and_arguments=f"\n{_FENCE}json\n",
    after_call=f"\n{_FENCE}{_END_CALL}",
    separator="\n",
    end=_END_CALLS,
)

_KIMI_CALLS, _KIMI_END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_OPENED = Markers(_KIMI_CALLS, _KIMI_CALL)
_KIMI_NUMBER = re.compile(r":[0-9]+$")


def _read_kimi(source: Source, reply: ParsedReply) -> Steps[None]:
    """Calls as Kimi K2 writes them: an id such as functions.get_weather:0, and JSON.

    The id is also the one that clients get, since the chat template shows it again in place of the name.
    """
    while marker := (yield from source.until(_KIMI_OPENED, reply.content)):
        source.keep()
        if marker == _KIMI_CALLS:
            yield from source.space()
        is_call = marker == _KIMI_CALL or (yield from source.literal(_KIMI_CALL))
        yield from source.space()
        call_id = (yield from source.run(_NAME)) if is_call else ""
        yield from source.space()
        is_call = (yield from source.literal(_KIMI_ARGUMENTS)) if call_id else False
        yield from source.space()
        if not is_call or (yield from source.peek()) != "{":
            reply.fail(_BAD_CALL)
            reply.content(marker + source.kept())
            continue
        source.kept()
        name = _KIMI_NUMBER.sub("", call_id).removeprefix("functions.") or call_id
        reply.begin_call(name, call_id)
        yield from read_value(source, reply.arguments)
        reply.end_call()
        yield from source.closing((_KIMI_END_CALL, _KIMI_END_CALLS), reply.content)


KIMI_K2 = ToolFormat(
    name="kimi_k2",
    read=_read_kimi,
    markers=(_KIMI_CALLS, _KIMI_END_CALLS, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END_CALL),
    opener=_KIMI_CALLS,
    begin=_KIMI_CALLS,
    before_name=f"{_KIMI_CALL}functions.",
    bare_name=True,
    numbers_calls=True,
    between_name_and_arguments=_KIMI_ARGUMENTS,
    after_call=_KIMI_END_CALL,
    end=_KIMI_END_CALLS,
)


def _read_opened(source: Source, reply: ParsedReply, *, opened: tuple[str, ...], closed: str) -> Steps[None]:
    """Calls as objects or arrays of JSON after a mark."""
    openers = Markers(*opened)
    while marker := (yield from source.until(openers, reply.content)):
        yield from read_calls(source, reply, marker + (yield from source.space()), sure=True)
        while reply.num_calls and closed:
            space = yield from source.space()
            if (yield from source.literal(closed)):
                break
            if (yield from source.peek()) != "{":
                reply.content(space)
                break
            yield from read_calls(source, reply, space, sure=True)


def _opened(
    name: str, opener: str, *, other: str = "", begin: str = "", separator: str = ", ", end: str = "", closed: str = ""
) -> ToolFormat:
    openers = tuple(filter(None, (opener, other)))
    return ToolFormat(
        name=name,
        read=partial(_read_opened, opened=openers, closed=closed),
        markers=tuple(filter(None, (*openers, closed))),
        opener=opener,
        begin=opener + begin,
        before_name='{"name": ',
        between_name_and_arguments=', "arguments": ',
        after_call="}",
        separator=separator,
        end=end + closed,
    )


GRANITE = _opened("granite", "<|tool_call|>", other="<tool_call>", begin="[", end="]")
GRANITE_20B = _opened("granite-20b-fc", "<function_call>", begin=" ", separator="<function_call> ")
MINIMAX = _opened("minimax", "<tool_calls>", begin="\n", separator="\n", end="\n", closed="</tool_calls>")
JAMBA = _opened("jamba", "<tool_calls>", begin="[", end="]", closed="</tool_calls>")

"""Calls as Llama 3 models write them: a JSON object with "parameters", alone or after <|python_tag|>.

Several objects are separated by ";". Promises: an object without the tag is a call where it begins a line or follows a
call, names a tool and has no keys but those of calls; any other JSON is an answer. Must not know: tokens.
"""

from __future__ import annotations

from quire_server.text.parsing.json_call import read_call
from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Markers, Source, Steps
from quire_server.text.parsing.tool_format import ToolFormat

_TAG = "<|python_tag|>"
_STOPS = Markers("\n", _TAG)


def _read(source: Source, reply: ParsedReply) -> Steps[None]:
    stop = "\n"  # the text begins a line
    while stop:
        if stop == _TAG:
            before = _TAG + (yield from source.space())
            if (yield from source.peek()) == "{":
                yield from _read_calls(source, reply, before, sure=True)
            else:
                reply.content(before)
        else:
            yield from source.show_space(reply.content)
            if (yield from source.peek()) == "{":
                yield from _read_calls(source, reply, "", sure=False)
        stop = yield from source.until(_STOPS, reply.content)
        if stop == "\n":
            reply.content(stop)


def _read_calls(source: Source, reply: ParsedReply, before: str, *, sure: bool) -> Steps[None]:
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
    read=_read,
    markers=(_TAG,),
    before_name='{"name": ',
    between_name_and_arguments=', "parameters": ',
    after_call="}",
    separator="; ",
)

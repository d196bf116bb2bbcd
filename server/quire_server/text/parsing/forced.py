"""Calls as plain JSON, for models without a format of their own: an array of calls, or one call.

A grammar forces it, or the prompt asks for it. Promises: JSON is a call where it begins a line, names a tool and has no
keys but those of calls; any other JSON is an answer. Must not know: tokens.
"""

from __future__ import annotations

from quire_server.text.parsing.json_call import read_calls
from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Markers, Source, Steps
from quire_server.text.parsing.tool_format import ToolFormat

_LINE_END = Markers("\n")


def _read(source: Source, reply: ParsedReply) -> Steps[None]:
    line_end = "\n"
    while line_end:
        yield from source.show_space(reply.content)
        if (yield from source.peek()) in {"[", "{"}:
            yield from read_calls(source, reply, "", sure=False)
        line_end = yield from source.until(_LINE_END, reply.content)
        reply.content(line_end)


FORCED = ToolFormat(
    name="json",
    read=_read,
    begin="[",
    before_name='{"name": ',
    between_name_and_arguments=', "arguments": ',
    after_call="}",
    separator=", ",
    end="]",
)

"""Calls as plain JSON, for models without a format of their own: the whole reply is an array of calls, or one call.

Promises: it is asked for only where a grammar forces it, so every object at the start of the reply is a call. Must not
know: tokens.
"""

from __future__ import annotations

from quire_server.text.parsing.json_call import read_calls
from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Source, Steps
from quire_server.text.parsing.tool_format import ToolFormat


def _read(source: Source, reply: ParsedReply) -> Steps[None]:
    yield from source.show_space(reply.content)
    if (yield from source.peek()) in {"[", "{"}:
        yield from read_calls(source, reply, "")
    yield from source.rest(reply.content)


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

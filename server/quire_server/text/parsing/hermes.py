"""Calls as Hermes and Qwen models write them: <tool_call>, a JSON object, </tool_call>.

Promises: what stands between the tags and is no call is content, with the tags. Must not know: tokens.
"""

from __future__ import annotations

from quire_server.text.parsing.json_call import read_call
from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Markers, Source, Steps
from quire_server.text.parsing.tool_format import ToolFormat

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_OPENED, _CLOSED = Markers(_OPEN), Markers(_CLOSE)


def _read(source: Source, reply: ParsedReply) -> Steps[None]:
    while (yield from source.until(_OPENED, reply.content)):
        space = yield from source.space()
        outcome = yield from read_call(source, reply, sure=True)
        if outcome == "call":
            yield from _read_close(source, reply)
        elif outcome == "broken":
            yield from source.until(_CLOSED, _ignore)
        else:
            reply.content(_OPEN + space + source.kept())


def _read_close(source: Source, reply: ParsedReply) -> Steps[None]:
    """The closing tag, before which small models write one brace too many, and which some forget."""
    space = yield from source.space()
    while (yield from source.peek()) == "}":
        source.take()
        space = yield from source.space()
    if not (yield from source.literal(_CLOSE)):
        reply.content(space)


def _ignore(text: str) -> None:
    """The rest of a call that is broken."""


HERMES = ToolFormat(
    name="hermes",
    read=_read,
    markers=(_OPEN, _CLOSE),
    opener=_OPEN,
    before_name=f'{_OPEN}\n{{"name": ',
    between_name_and_arguments=', "arguments": ',
    after_call=f"}}\n{_CLOSE}",
    separator="\n",
)

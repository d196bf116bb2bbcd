"""Calls as Mistral models write them, after [TOOL_CALLS]: an array of JSON objects, or name[ARGS]{...}.

The second form is that of the models since 2025, which repeat the marker before each call. Promises: both are read,
whichever the model was trained on. Must not know: tokens.
"""

from __future__ import annotations

import re
from dataclasses import replace

from quire_server.text.parsing.json_call import read_calls, read_value
from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Markers, Source, Steps
from quire_server.text.parsing.tool_format import ToolFormat, mistral_id

_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_OPENED = Markers(_CALLS)
_NAME = re.compile(r"[^\s\[\]{}()\"<>]+")


def _read(source: Source, reply: ParsedReply) -> Steps[None]:
    while (yield from source.until(_OPENED, reply.content)):
        before = _CALLS + (yield from source.space())
        if (yield from source.peek()) in {"[", "{"}:
            yield from read_calls(source, reply, before, sure=True)
        else:
            yield from _read_named(source, reply, before)


def _read_named(source: Source, reply: ParsedReply, before: str) -> Steps[None]:
    """The model's own ids are passed over: it may repeat them, and a history needs each once."""
    source.keep()
    name = yield from source.run(_NAME)
    if (yield from source.literal(_ID)):
        yield from source.run(_NAME)
    yield from source.literal(_ARGS)
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
    read=_read,
    markers=(_CALLS, _ARGS, _ID),
    opener=_CALLS,
    new_id=mistral_id,
    begin=f"{_CALLS}[",
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
    before_name=_CALLS,
    bare_name=True,
    between_name_and_arguments=_ARGS,
    after_call="",
    separator="",
    end="",
)

"""Whole replies as gpt-oss models write them: messages in channels for thoughts, calls and the answer.

A message is a header, <|message|>, a text, and the token that ends it. The header names the channel (analysis,
commentary, final) and the recipient of a call (to=functions.name); the prompt ends inside the first header.
"""

from __future__ import annotations

import re

from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Markers, Show, Source, Steps
from quire_server.text.parsing.tool_format import ToolFormat

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_RECIPIENT = "to="  # models write a call's recipient on either side of its channel
_BEGINS = (_START, _CHANNEL, _RECIPIENT, _MESSAGE)
_HEADER_ENDS = Markers(_MESSAGE, _START, _END, _CALL, _RETURN)
_TEXT_ENDS = Markers(_START, _CHANNEL, _END, _CALL, _RETURN)
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT_NAME = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_FUNCTIONS = "functions."

THOUGHTS, END_OF_THOUGHTS, NEXT_MESSAGE = f"{_CHANNEL}analysis{_MESSAGE}", _END, f"{_START}assistant"
ANSWER = f"{_CHANNEL}final{_MESSAGE}"
MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)


def _read(source: Source, reply: ParsedReply) -> Steps[None]:
    """Text outside of messages is content. A header without a message is dropped."""
    shown: set[Show] = set()
    mark = ""  # the one that ended the last message; it may begin the next one
    while True:
        if mark not in _BEGINS:
            space = yield from source.space()
            if not (yield from source.peek()):
                reply.content(space)
                return
            mark = yield from _begin(source)
            if not mark:
                reply.content(space)
                mark = yield from source.until(_TEXT_ENDS, reply.content)
                continue
        pieces = [mark]
        end = mark if mark == _MESSAGE else (yield from source.until(_HEADER_ENDS, pieces.append))
        if end == _MESSAGE:
            mark = yield from _read_text(source, reply, "".join(pieces), shown)
        else:
            if mark == _RECIPIENT:  # text that only looks like a header
                reply.content("".join(pieces))
            mark = end


def _begin(source: Source) -> Steps[str]:
    """The mark that begins a header here; empty where text comes."""
    for mark in _BEGINS:
        if (yield from source.literal(mark)):
            return mark
    return ""


def _read_text(source: Source, reply: ParsedReply, header: str, shown: set[Show]) -> Steps[str]:
    """A message's text; returns the mark that ended it. Calls of the model's built-in tools are thoughts."""
    recipient, channel = _RECIPIENT_NAME.search(header), _CHANNEL_NAME.search(header)
    name = recipient[1] if recipient is not None else ""
    if reply.tools and (name.startswith(_FUNCTIONS) or name in reply.tools):
        reply.begin_call(name.removeprefix(_FUNCTIONS))
        mark = yield from source.until(_TEXT_ENDS, reply.arguments)
        reply.end_call()
        return mark
    reply.is_thinking = name != "" or (channel is not None and channel[1] == "analysis")
    show = reply.think if reply.is_thinking else reply.content
    if show in shown:
        show("\n")
    shown.add(show)
    mark = yield from source.until(_TEXT_ENDS, show)
    reply.is_thinking = False
    return mark


HARMONY = ToolFormat(
    name="openai",
    read=_read,
    markers=MARKERS,
    reads_thoughts=True,
    before_answer=ANSWER,
    opener=f"{_CHANNEL}commentary",
    before_name=f"{_CHANNEL}commentary to={_FUNCTIONS}",
    bare_name=True,
    between_name_and_arguments=f" {_CONSTRAIN}json{_MESSAGE}",
    separator=f"{_CALL}{NEXT_MESSAGE}",
    one_call=True,
)

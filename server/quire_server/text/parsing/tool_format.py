"""A format of tool calls: how to read them, and how to write them.

Promises: calls are written as `begin`, the calls with `separator` between them, `end`; a call as `before_name`, its
name as JSON (or bare, if `bare_name`), `:` and a number (if `numbers_calls`), `between_name_and_arguments`, its
arguments as JSON or as `parameters` says, `after_call`. A grammar forces this form, and the reader parses it.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field

from quire_server.text.parsing.parsed_reply import ParsedReply
from quire_server.text.parsing.source import Source, Steps

_ALPHANUMERIC = string.ascii_letters + string.digits


def openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def mistral_id() -> str:
    """Mistral's templates refuse ids of another form."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """How arguments are written one by one: `before`, the name, `named`, the value, `after`; `separator` between them.

    A value that is a string stands as it is, any other one as JSON; with `quotes` every value is JSON.
    """

    before: str = ""
    named: str
    after: str = ""
    separator: str = ""  # if there is one, required arguments come first
    quotes: bool = False
    named_other: str = ""  # instead of `named` before a value that is no string; "": the same

    def opening(self, name: str, *, is_text: bool) -> str:
        """The text before a value."""
        return self.before + name + (self.named if is_text else self.named_other or self.named)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format. Its written form is exactly what such models were trained on."""

    name: str
    read: Callable[[Source, ParsedReply], Steps[None]]  # until the end of the text
    markers: tuple[str, ...] = ()  # the reader needs them, also if they are special tokens
    opener: str = ""  # the text with which every call and no answer begins; "": calls are recognised by their content
    new_id: Callable[[], str] = field(default=openai_id)
    reads_thoughts: bool = False  # whether the reader parses the whole reply, with its thoughts
    before_answer: str = ""  # the text with which every answer begins
    # How calls are written; unused if arguments are written neither as JSON nor one by one.
    writes_json: bool = True
    parameters: Parameters | None = None
    begin: str = ""
    before_name: str = ""
    bare_name: bool = False
    numbers_calls: bool = False
    between_name_and_arguments: str = ""
    after_call: str = ""
    separator: str = ""
    end: str = ""
    one_call: bool = False  # a reply ends with its first call

    @property
    def can_be_forced(self) -> bool:
        """Whether a grammar can make a model write calls in this format."""
        return self.writes_json or self.parameters is not None


class CallParser:
    """Parses the text of one reply's answer into `reply`."""

    def __init__(self, tool_format: ToolFormat, reply: ParsedReply) -> None:
        self._reply = reply
        self._source = Source()
        self._steps = tool_format.read(self._source, reply)
        next(self._steps)

    def push(self, text: str) -> str:
        """The content that is complete with `text`."""
        if text:
            self._source.push(text)
            next(self._steps, None)
        return self._reply.take_content()

    def finish(self) -> str:
        """End the reply; returns content that was held back."""
        self._source.end()
        next(self._steps, None)
        self._reply.finish()
        return self._reply.take_content()

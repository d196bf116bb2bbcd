"""How the replies to one chat request are read: where thoughts end, which text is a call, how long may be thought.

Promises: a request that needs none of it pays nothing. Must not know: how models write, dialects, the engine's work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.types import ThinkingParams
from quire_server.answering.constraining.calls import reading_format
from quire_server.answering.constraining.constraints import Thinking
from quire_server.answering.options import Conversation, GenerationOptions
from quire_server.state import ServerState
from quire_server.text.parsing.forced import FORCED
from quire_server.text.parsing.reply_parser import ReplyParser
from quire_server.text.parsing.tool_format import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a generation and the engine have to know of it."""

    new_parser: Callable[[], ReplyParser]
    shown_ids: frozenset[int]  # special tokens that the parser has to see
    thinking: ThinkingParams | None = None  # None: as long as the model likes
    call_format: ToolFormat | None = None  # None: nothing is a call
    thoughts: Thinking | None = None  # that may come before the answer


def reading(state: ServerState, options: GenerationOptions, prompt: str) -> Reading | None:
    """For a rendered conversation; None where all that the model says is its answer."""
    tools = options.tools
    may_call = tools is not None and tools.choice != "none"
    marks = state.formats.marks
    if not may_call and marks is None:
        return None
    is_open = marks is not None and _is_open(options, prompt, marks.start, marks.end)
    formats = state.formats
    call_format = None
    if may_call:  # a model that is told of tools in words writes the calls that the words ask for
        call_format = reading_format(tools, formats.calls if state.shows_tools else FORCED)

    def new_parser() -> ReplyParser:
        return ReplyParser(
            marks=marks,
            is_open=is_open,
            tool_format=call_format,
            tools={tool.name: tool.parameters for tool in tools.tools} if tools is not None else {},
            parallel=tools is None or tools.parallel,
        )

    return Reading(
        new_parser=new_parser,
        shown_ids=formats.shown_ids(reads_calls=call_format is formats.calls),
        thinking=_budget(state, options, is_open=is_open),
        call_format=call_format,
        # A block that the prompt has closed already is not opened again.
        thoughts=None
        if marks is None or prompt.rstrip().endswith(marks.end)
        else Thinking(marks=marks, is_open=is_open),
    )


def _is_open(options: GenerationOptions, prompt: str, start: str, end: str) -> bool:
    """Whether the prompt ends inside a block of thoughts: its template opens one, or the message that is continued."""
    if prompt.rstrip().endswith(start):
        return True
    source = options.prompt.source
    if not isinstance(source, Conversation) or not source.continue_final_message:
        return False
    content = source.messages[-1].get("content")
    return isinstance(content, str) and content.rfind(start) > content.rfind(end)


def _budget(state: ServerState, options: GenerationOptions, *, is_open: bool) -> ThinkingParams | None:
    marks, most = state.formats.marks, options.reasoning.max_tokens
    if marks is None or most is None:
        return None
    return ThinkingParams(
        start_ids=tuple(state.tokenizer.encode(marks.start, add_special_tokens=False)),
        end_ids=tuple(state.tokenizer.encode(marks.end, add_special_tokens=False)),
        is_open=is_open,
        max_tokens=most,
    )

"""One choice's text as it grows: thoughts first, then content and calls.

Promises: content, thoughts and calls do not depend on how the text was cut into tokens, except that marks of thinking
that are tokens count only as those tokens. Must not know: stop strings, other choices.
"""

from __future__ import annotations

from collections.abc import Callable

from quire_server.text.parsing.calls import CallDelta
from quire_server.text.parsing.parsed_reply import ParsedReply, Schemas
from quire_server.text.parsing.reasoning import ThinkingMarks
from quire_server.text.parsing.thinking import ThinkingSplitter
from quire_server.text.parsing.tool_format import CallParser, ToolFormat


class ReplyParser:
    """Push each token's piece of text. `reasoning` and `calls` are news until the receiver empties them."""

    def __init__(
        self,
        *,
        marks: ThinkingMarks | None = None,
        is_open: bool = False,
        tool_format: ToolFormat | None = None,
        tools: Schemas | None = None,
        parallel: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """`marks` None: the model does not think. `is_open`: the prompt's end has opened the block of thoughts.

        `tool_format` None: nothing is a call. `parallel` False: only the first call is one. `new_id`: of calls, where
        the format's own ids will not do.
        """
        self.reasoning = ""
        self.calls: list[CallDelta] = []
        self._splitter = ThinkingSplitter(marks, is_open=is_open) if marks is not None else None
        self._reply = ParsedReply(
            tools or {}, new_id=new_id or (tool_format.new_id if tool_format is not None else str), parallel=parallel
        )
        self._call_parser = CallParser(tool_format, self._reply) if tool_format is not None else None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside the block of thoughts so far."""
        return self._splitter.num_tokens if self._splitter is not None else 0

    @property
    def is_over(self) -> bool:
        """Whether pieces may be shown as they are, except for those of the marks of thinking."""
        return self._call_parser is None and (self._splitter is None or self._splitter.is_over)

    @property
    def has_calls(self) -> bool:
        """The reply has begun a call, which a client has been or will be shown."""
        return self._reply.num_calls > 0

    @property
    def call_error(self) -> str | None:
        """Why a call could not be read, or is not JSON; the first such reason."""
        return self._reply.error

    def push(self, token_id: int, piece: str) -> str:
        """The content that this token settles."""
        if self._splitter is not None:
            piece = self._splitter.push(token_id, piece)
        return self._parse(piece)

    def finish(self, piece: str = "") -> str:
        """What was held when the choice ended. `piece` is what its last tokens had left of a character."""
        if self._splitter is not None:
            piece = self._splitter.finish(piece)
        content = self._parse(piece)
        if self._call_parser is not None:
            content += self._call_parser.finish()
            self.calls += self._reply.take_calls()
        return content

    def _parse(self, text: str) -> str:
        if self._splitter is not None and self._splitter.reasoning:
            self.reasoning += self._splitter.reasoning
            self._splitter.reasoning = ""
        if self._call_parser is None or not text:
            return text
        content = self._call_parser.push(text)
        self.calls += self._reply.take_calls()
        return content

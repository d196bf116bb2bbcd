"""Parses one choice's text as it grows: reasoning first, then content and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from quire_server.text.parsing.calls import CallDelta
from quire_server.text.parsing.parsed_reply import ParsedReply, Schemas
from quire_server.text.parsing.reasoning import ThinkingMarks
from quire_server.text.parsing.source import Markers, Source, Steps
from quire_server.text.parsing.tool_format import CallParser, ToolFormat


class ReplyParser:
    """Push each token's piece of text. `reasoning` and `calls` collect news until the receiver empties them.

    The result does not depend on how the text was cut into tokens, except that marks that are tokens count only as
    those tokens.
    """

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
        """`marks` None: reasoning is content. `is_open`: the prompt's end has opened the block of reasoning.

        `tool_format` None: calls are not parsed. `parallel` False: only the first call is kept. `new_id`: makes the
        calls' ids instead of the format.
        """
        self.reasoning = ""
        self.calls: list[CallDelta] = []
        self._reads_thoughts = tool_format is not None and tool_format.reads_thoughts
        is_split = marks is not None and not self._reads_thoughts
        self._splitter = ThinkingSplitter(marks, is_open=is_open) if marks is not None and is_split else None
        self._num_thought = 0  # tokens of thoughts that the format itself parsed
        self._reply = ParsedReply(
            tools or {},
            new_id=new_id or (tool_format.new_id if tool_format is not None else str),
            parallel=parallel,
            parts_thoughts=marks is not None,
        )
        self._call_parser = CallParser(tool_format, self._reply) if tool_format is not None else None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside the block of reasoning so far."""
        return self._splitter.num_tokens if self._splitter is not None else self._num_thought

    @property
    def is_over(self) -> bool:
        """Whether further pieces are content as they are, except for marks that are tokens."""
        return self._call_parser is None and (self._splitter is None or self._splitter.is_over)

    @property
    def has_calls(self) -> bool:
        """Whether the reply has a call."""
        return self._reply.num_calls > 0

    @property
    def call_error(self) -> str | None:
        """The first error in a call, such as one that is not JSON."""
        return self._reply.error

    def push(self, token_id: int, piece: str) -> str:
        """The content that is complete with this token."""
        if self._splitter is not None:
            piece = self._splitter.push(token_id, piece)
        if not self._reads_thoughts:
            return self._parse(piece)
        was_thinking = self._reply.is_thinking
        content = self._parse(piece)
        self._num_thought += was_thinking and self._reply.is_thinking
        return content

    def finish(self, piece: str = "") -> str:
        """The held-back content, when the choice ends. `piece`: the rest of an incomplete character."""
        if self._splitter is not None:
            piece = self._splitter.finish(piece)
        content = self._parse(piece)
        if self._call_parser is not None:
            content += self._call_parser.finish()
            self.calls += self._reply.take_calls()
            self.reasoning += self._reply.take_thoughts()
        return content

    def _parse(self, text: str) -> str:
        if self._splitter is not None and self._splitter.reasoning:
            self.reasoning += self._splitter.reasoning
            self._splitter.reasoning = ""
        if self._call_parser is None or not text:
            return text
        content = self._call_parser.push(text)
        self.calls += self._reply.take_calls()
        self.reasoning += self._reply.take_thoughts()
        return content


_SPACE = " \t\r\n"


class ThinkingSplitter:
    """Splits one choice's text into reasoning and answer. `reasoning` collects news until the receiver empties it.

    A reply has at most one block of reasoning, at its start. Whitespace around the reasoning and before the answer
    after it is dropped, as in SGLang. A block that is never closed is reasoning as a whole. If the marks are tokens,
    only those tokens count, so that a model can write about them, and they are not shown.
    """

    def __init__(self, marks: ThinkingMarks, *, is_open: bool) -> None:
        """`is_open`: the prompt's end has opened the block."""
        self.reasoning = ""
        self.num_tokens = 0  # tokens inside the block, without marks that are tokens
        self._marks = marks
        self._part: Literal["before", "thoughts", "answer"] = "thoughts" if is_open else "before"
        self._is_trimming = True  # the part has only whitespace so far
        self._space: list[str] = []  # whitespace that belongs to the part if more text follows
        self._shown: list[str] = []  # complete text of the answer
        self._source = Source()
        self._steps = self._read()
        next(self._steps)

    def push(self, token_id: int, piece: str) -> str:
        """The answer's text that is complete with this token."""
        is_thought = self._part == "thoughts"
        if self._marks.are_tokens:
            is_mark = self._push_token(token_id, piece)
            is_thought = is_thought and not is_mark
        elif piece:
            self._source.push(piece)
            next(self._steps, None)
        self.num_tokens += is_thought
        return self._take()

    @property
    def is_over(self) -> bool:
        """Whether all further text is answer; marks that are tokens are still not shown."""
        return self._part == "answer" and not self._is_trimming and self._marks.are_tokens

    def finish(self, piece: str = "") -> str:
        """The held-back text, and `piece`, which has no token."""
        if self._marks.are_tokens:
            self._show(piece)
        else:
            self._source.push(piece)
            self._source.end()
            next(self._steps, None)
        if self._part == "before":  # only whitespace came, and no block
            self._shown += self._space
        return self._take()

    def _push_token(self, token_id: int, piece: str) -> bool:
        """Whether the token is a mark. Its piece may begin with the rest of an incomplete character."""
        marks = self._marks
        if token_id not in {marks.start_id, marks.end_id}:
            self._show(piece)
            return False
        before, _, after = piece.partition(marks.start if token_id == marks.start_id else marks.end)
        self._show(before)
        if token_id == marks.start_id:
            self._open()
        else:
            self._close()
        self._show(after)
        return True

    def _read(self) -> Steps[None]:
        """Parses marks that are texts. Some models open the block again although the prompt has opened it."""
        source, marks = self._source, self._marks
        self._show((yield from source.space()))
        if (yield from source.literal(marks.start)):
            self._open()
        if self._part == "thoughts" and (yield from source.until(Markers(marks.end), self._show)):
            self._close()
        yield from source.rest(self._show)

    def _open(self) -> None:
        if self._part == "before":
            self._part = "thoughts"
            self._space = []

    def _close(self) -> None:
        if self._part == "thoughts":
            self._part = "answer"
            self._is_trimming = True
            self._space = []

    def _show(self, text: str) -> None:
        if self._part == "thoughts":
            self._think(text)
        elif self._part == "before":
            self._space.append(text)
            if text.strip(_SPACE):
                self._part, self._is_trimming = "answer", False
                self._shown += self._space
        else:
            text = text.lstrip(_SPACE) if self._is_trimming else text
            self._is_trimming = self._is_trimming and not text
            self._shown.append(text)

    def _think(self, text: str) -> None:
        text = text.lstrip(_SPACE) if self._is_trimming else text
        body = text.rstrip(_SPACE)
        if body:
            self.reasoning += "".join([*self._space, body])
            self._is_trimming = False
            self._space = []
        self._space.append(text[len(body) :])

    def _take(self) -> str:
        shown, self._shown = self._shown, []
        return "".join(shown)

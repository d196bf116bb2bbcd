"""One choice of a generation: turns tokens into text, reasoning and tool calls, and decides where it ends.

Each piece of content is in exactly one delta, and no delta follows the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire_engine.contract.types import GenerationRequest, TokenLogprobs, TokenOutput
from quire_server.text.detokenizer import Detokenizer
from quire_server.text.parsing.calls import CallDelta
from quire_server.text.parsing.reply_parser import ReplyParser
from quire_server.text.stop_strings import StopMatcher
from quire_server.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    text: str


def pieces(
    delta: ChoiceDelta, *, open_call: int | None, is_answer_open: bool
) -> Iterator[Thought | Answer | CallDelta]:
    """The pieces of a delta in the order in which the model wrote them, as far as that is known.

    First pieces of the open call, or of the open answer; then reasoning, the answer and calls. Empty texts are left
    out.
    """
    yield from (call for call in delta.calls if call.index == open_call)
    texts: list[Thought | Answer] = [Thought(delta.reasoning), Answer(delta.text)]
    yield from (piece for piece in (reversed(texts) if is_answer_open else texts) if piece.text)
    yield from (call for call in delta.calls if call.index != open_call)


ChoiceFinish = Literal["stop", "length", "tool_calls", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """The options for turning tokens into text; the same for all choices of a request."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0  # stop strings within the first `min_tokens` tokens are ignored
    skip_special_tokens: bool = True
    new_parser: Callable[[], ReplyParser] | None = None  # makes a parser for each choice; None: all output is text
    counts_thoughts: bool = False  # the usage has the number of reasoning tokens
    shown_ids: frozenset[int] = frozenset()  # special tokens that the parser needs
    calls_finish: bool = True  # a choice that ends with calls has the finish reason "tool_calls"


@dataclass(slots=True, kw_only=True)
class ChoiceDelta:
    """The new content of one choice since its last delta. The receiver owns the lists."""

    index: int  # prompt number * n + choice number
    prompt: int
    is_first: bool = False
    text: str = ""
    reasoning: str = ""  # reasoning before the text
    calls: list[CallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, or empty
    offsets: list[int] = field(default_factory=list)  # with logprobs: characters of the choice's text before each token
    finish_reason: ChoiceFinish | None = None
    stop_reason: str | int | None = None  # the stop string or token id; None for the tokenizer's end-of-text token
    beam_score: float | None = None  # of a beam search hypothesis, in its last delta
    echoed: Sequence[TokenLogprobs | None] = ()  # scores of prompt tokens, if the text echoes a part of the prompt


class Choice:
    """Turns one choice's tokens into text and decides where it ends."""

    def __init__(
        self, delta: ChoiceDelta, request: GenerationRequest, options: TextOptions, tokenizer: TextTokenizer
    ) -> None:
        self.finish_reason: ChoiceFinish | None = None
        self.num_new_thoughts = 0  # reasoning tokens that the usage does not have yet
        self._new = delta
        self._is_opened = False
        self._is_closed = False
        self._num_tokens = 0
        self._num_unsent = 0
        self._num_chars = 0
        self._min_tokens = options.min_tokens
        self._include_stop = options.include_stop
        self._eos_id = next(iter(tokenizer.eos_token_ids), None)
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            prompt_ids=request.prompt_token_ids,
            shown_ids=options.shown_ids,
        )
        self._parser = None if options.new_parser is None else options.new_parser()
        self._calls_finish = options.calls_finish
        self._is_answering = False
        self._shown_ids = options.shown_ids
        self._num_reasoning_tokens = 0
        self._matcher = StopMatcher(options.stop, options.include_stop) if options.stop else None

    def absorb(self, output: TokenOutput) -> int:
        """Take in one output; returns the number of its tokens that belong to the choice, 0 after a stop string."""
        if self.finish_reason is not None:
            return 0
        # A stop token ends the text but is not part of it, unless the client asks for it.
        hidden = 1 if output.stop_token_id is not None and not self._include_stop else 0
        pieces = self._detokenizer.push_each(output.token_ids[: len(output.token_ids) - hidden])
        pieces.extend([""] * hidden)
        shown: Iterator[str] = iter(pieces)
        parser = self._parser
        if parser is not None and self._is_answering and self._shown_ids.isdisjoint(output.token_ids):
            parser = None  # the reasoning has ended, and no calls are parsed
        if parser is not None:  # lazily: tokens after a stop string are not parsed
            shown = map(parser.push, output.token_ids, pieces)
        if self._matcher is None:
            pieces = list(shown)
            self._new.text += "".join(pieces)
        else:
            pieces = self._match(self._matcher, shown)
        if parser is not None:
            self._take_parsed(parser)
        count = len(pieces)
        self._num_tokens += count
        self._num_unsent += count
        self._new.token_ids.extend(output.token_ids[:count])
        if output.logprobs is not None:
            self._new.logprobs.extend(output.logprobs[:count])
            for piece in pieces[:count]:
                self._new.offsets.append(self._num_chars)
                self._num_chars += len(piece)
        if output.finish is not None and self.finish_reason is None:
            self._end(output)
        return count

    @property
    def is_plain(self) -> bool:
        """Whether its tokens are text, with no parser and no stop strings."""
        return self._parser is None and self._matcher is None

    def take_plain(self, token_ids: Sequence[int]) -> str:
        """The text of tokens between the first and the last of a plain choice, of which every delta was taken.

        They do as well in `absorb` and `take`, which are for all choices.
        """
        self._num_tokens += len(token_ids)
        return self._detokenizer.push(token_ids)

    def take(self) -> ChoiceDelta | None:
        """The delta that is due now, or None."""
        is_due = self.finish_reason is not None or not self._is_opened or self._num_unsent > 0
        if not is_due or self._is_closed or (self._num_tokens == 0 and self.finish_reason is None):
            return None
        delta = self._new
        delta.is_first = not self._is_opened
        self._is_opened = True
        self._is_closed = self.finish_reason is not None
        self._num_unsent = 0
        self._new = ChoiceDelta(index=delta.index, prompt=delta.prompt)
        return delta

    def _take_parsed(self, parser: ReplyParser) -> None:
        self._is_answering = parser.is_over
        self.num_new_thoughts += parser.num_reasoning_tokens - self._num_reasoning_tokens
        self._num_reasoning_tokens = parser.num_reasoning_tokens
        self._new.reasoning += parser.reasoning
        self._new.calls += parser.calls
        parser.reasoning, parser.calls = "", []

    def _match(self, matcher: StopMatcher, pieces: Iterator[str]) -> list[str]:
        """Append text that cannot belong to a stop string; returns the pieces up to a stop string's end, or all."""
        taken = []
        for count, piece in enumerate(pieces, start=1):
            taken.append(piece)
            shown, stop = matcher.push(piece, examine=self._num_tokens + count > self._min_tokens)
            self._new.text += shown
            if stop is not None:
                self._finish("stop", stop)
                break
        return taken

    def _end(self, output: TokenOutput) -> None:
        """The engine has ended the choice: flush the held-back text, which may itself complete a stop string."""
        text, stop = self._detokenizer.finish(), None
        self._new.beam_score = output.beam_score
        if self._parser is not None:
            text = self._parser.finish(text)
            self._take_parsed(self._parser)
        if self._matcher is not None:
            text, stop = self._matcher.push(text, examine=self._num_tokens > self._min_tokens)
            if stop is None:
                text += self._matcher.finish()
        self._new.text += text
        stop_id = output.stop_token_id
        if stop is not None:
            self._finish("stop", stop)
        else:
            self._finish(
                output.finish if output.finish in {"stop", "abort"} else "length",
                None if stop_id == self._eos_id else stop_id,
            )

    def _finish(self, reason: ChoiceFinish, stop_reason: str | int | None) -> None:
        if reason == "stop" and self._calls_finish and self._parser is not None and self._parser.has_calls:
            reason = "tool_calls"
        self.finish_reason = self._new.finish_reason = reason
        self._new.stop_reason = stop_reason

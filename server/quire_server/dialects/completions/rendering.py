"""Renders replies of /v1/completions as JSON bytes, whole or streamed; long log-probabilities in pieces.

A frame of plain text costs one escape and two concatenations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

from quire_engine.contract.types import TokenLogprobs
from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.echoing import prompt_offsets
from quire_server.answering.generation import Generation
from quire_server.answering.prepare import Job
from quire_server.answering.rendering import (
    PLAIN_END,
    ReplyHead,
    closing_fields,
    ending,
    last_timings,
    progress_frames,
    score_field,
    timings_field,
    usage_field,
)
from quire_server.errors import ApiError
from quire_server.http.json_text import (
    IDS_AT_ONCE,
    Pieces,
    encode,
    pieces_of_ids,
    pieces_of_list,
    pieces_of_object,
    pieces_of_parts,
    pieces_of_text,
)
from quire_server.http.sse import error_frames
from quire_server.text.logprobs import CompletionArrays, LogprobFormat, chosen
from quire_server.text.tokenizer import TextTokenizer

TOKENS_AT_ONCE = 64  # about 2 ms with 20 alternatives per token


def _at_once(num_top: int) -> int:
    """How many tokens make a piece: fewer where each has many alternatives."""
    return max(1, TOKENS_AT_ONCE * 20 // max(20, num_top))


def prompt_pieces(names: LogprobFormat, positions: Sequence[TokenLogprobs | None], num_top: int) -> Pieces:
    """The JSON of `LogprobFormat.prompt`, in pieces of a few tokens."""
    return Pieces(pieces_of_list(positions, _at_once(num_top), lambda some, _: names.prompt(some, num_top)))


def chat_pieces(names: LogprobFormat, positions: Sequence[TokenLogprobs], num_top: int) -> Pieces:
    """The JSON of `LogprobFormat.chat`, in pieces."""
    content = pieces_of_list(positions, _at_once(num_top), lambda some, _: names.chat(some, num_top)["content"])
    return Pieces(pieces_of_object({"content": Pieces(content), "refusal": None}))


def completion_pieces(
    names: LogprobFormat,
    positions: Sequence[TokenLogprobs | None],
    first_ids: Sequence[int],
    offsets: Iterator[int],
    num_top: int,
) -> Pieces:
    """The JSON of `LogprobFormat.completion`, in pieces."""
    columns = {
        "tokens": pieces_of_list(
            positions, TOKENS_AT_ONCE, lambda some, at: names.names(some, () if at else first_ids)
        ),
        "token_logprobs": pieces_of_list(positions, IDS_AT_ONCE, lambda some, _: chosen(some)),
        "top_logprobs": pieces_of_list(positions, _at_once(num_top), lambda some, _: names.tops(some, num_top)),
        "text_offset": _numbers(offsets),
    }
    return Pieces(pieces_of_object({name: Pieces(column) for name, column in columns.items()}))


def _numbers(numbers: Iterator[int]) -> Iterator[bytes]:
    """A JSON list of numbers that are computed while it is encoded."""
    start = b"["
    while some := list(islice(numbers, TOKENS_AT_ONCE)):
        yield start + encode(some)[1:-1]
        start = b","
    yield b"]" if start == b"," else b"[]"


class CompletionRenderer:
    """The renderer for /v1/completions. A choice has its prompt's echo, ids and log-probabilities."""

    def __init__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> None:
        self._head = head.encoded("cmpl-", "text_completion")
        self._options = job.options.reply
        self._requests = job.requests
        self._prompt_texts = job.prompt_texts
        self._generation = generation
        self._tokenizer = tokenizer
        self._format = LogprobFormat(tokenizer, names_are_ids=self._options.names_are_ids)
        self._prefix = b"data: " + self._head + b',"choices":[{"index":'
        self._num_sent = 0  # tokens in frames so far, for the usage in every frame

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """A frame for each choice with new tokens, even without text, so that clients can time them.

        After the last deltas also the end of the stream.
        """
        chunk = progress_frames(self._generation, self._requests[0].n, self._prefix, b',"text":""')
        usage = b""
        for delta in deltas:
            if self._options.usage_always:
                self._num_sent += len(delta.token_ids)
                usage = usage_field(self._generation.usage, self._num_sent)
            text = self._text(delta)
            chunk += b'%b%d,"text":%b' % (self._prefix, delta.index, encode(text))
            if delta.finish_reason is None and self._options.num_logprobs is None and not self._options.token_ids:
                chunk += b"%b%b}\n\n" % (PLAIN_END, usage)
                continue
            fields = closing_fields(self._logprobs(delta), delta)
            if self._options.token_ids:
                if delta.is_first:
                    fields["prompt_token_ids"] = self._requests[delta.prompt].prompt_token_ids
                fields["token_ids"] = delta.token_ids
            timings = last_timings(self._options, self._generation, is_last=delta is deltas[-1])
            chunk += b",%b]%b%b}\n\n" % (encode(fields)[1:], usage, timings)
        if self._generation.finished:
            chunk += ending(b"data: " + self._head, self._options, self._generation)
        return chunk

    def around_text(self) -> tuple[bytes, bytes] | None:
        options = self._options
        if options.usage_always or options.num_logprobs is not None or options.token_ids:
            return None
        return self._prefix + b'0,"text":', PLAIN_END + b"}\n\n"

    def body(self, deltas: Sequence[ChoiceDelta]) -> Iterator[bytes]:
        """The whole reply from one complete delta per choice, in the order of their index."""
        yield self._head + b',"choices":'
        yield from pieces_of_parts(pieces_of_object(self._choice(delta)) for delta in deltas)
        yield usage_field(self._generation.usage) + timings_field(self._options, self._generation) + b"}"

    def _choice(self, delta: ChoiceDelta) -> dict[str, object]:
        """A choice of a whole reply."""
        wanted, with_ids = self._options.num_prompt_logprobs, self._options.token_ids
        positions = self._generation.prompt_logprobs.get(delta.prompt, ())
        return {
            "index": delta.index,
            "text": Pieces(pieces_of_text(self._text(delta))),
            "logprobs": self._columns(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_logprobs": None if wanted is None else prompt_pieces(self._format, positions, wanted),
            "prompt_token_ids": Pieces(pieces_of_ids(self._requests[delta.prompt].prompt_token_ids))
            if with_ids
            else None,
            "token_ids": delta.token_ids if with_ids else None,
        } | score_field(delta)

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error)

    def _text(self, delta: ChoiceDelta) -> str:
        if self._options.echo and delta.is_first and not delta.echoed:
            return self._prompt_texts[delta.prompt] + delta.text
        return delta.text

    def _logprobs(self, delta: ChoiceDelta) -> CompletionArrays | None:
        """The log-probabilities of a streamed delta."""
        wanted = self._options.num_logprobs
        if wanted is None:
            return None
        if delta.echoed:
            return self._format.completion(
                delta.echoed, self._requests[delta.prompt].prompt_token_ids, delta.offsets, wanted
            )
        positions, prompt_ids, offsets = self._shown(delta)
        return self._format.completion(positions, prompt_ids, list(offsets), wanted)

    def _columns(self, delta: ChoiceDelta) -> Pieces | None:
        """The log-probabilities of a whole choice."""
        wanted = self._options.num_logprobs
        if wanted is None:
            return None
        positions, prompt_ids, offsets = self._shown(delta)
        return completion_pieces(self._format, positions, prompt_ids, offsets, wanted)

    def _shown(self, delta: ChoiceDelta) -> tuple[Sequence[TokenLogprobs | None], Sequence[int], Iterator[int]]:
        """The tokens with log-probabilities, the prompt's ids if they are among them, and all text offsets."""
        if not self._options.echo:
            return delta.logprobs, (), iter(delta.offsets)
        text = self._prompt_texts[delta.prompt]
        offsets = (len(text) + offset for offset in delta.offsets)
        if not delta.is_first:
            return delta.logprobs, (), offsets
        prompt_ids = self._requests[delta.prompt].prompt_token_ids
        positions = (*self._generation.prompt_logprobs.get(delta.prompt, ()), *delta.logprobs)
        return positions, prompt_ids, chain(prompt_offsets(self._tokenizer, prompt_ids, text), offsets)

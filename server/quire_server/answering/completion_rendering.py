"""Replies of /v1/completions as JSON bytes: whole ones, and the server-sent frames of streamed ones.

Promises: a frame of plain text costs one escape and two concatenations. Must not know: sockets, the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Generation
from quire_server.answering.prepare import Job
from quire_server.answering.rendering import (
    PLAIN_END,
    ReplyHead,
    closing_fields,
    encode,
    ending,
    score_field,
    usage_field,
)
from quire_server.errors import ApiError
from quire_server.http.sse import error_frames
from quire_server.text.detokenizer import Detokenizer
from quire_server.text.logprobs import CompletionArrays, LogprobFormat
from quire_server.text.tokenizer import TextTokenizer


class CompletionRenderer:
    """The shapes of /v1/completions. Choices carry their prompt's part: its echo, ids and log-probabilities."""

    def __init__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> None:
        self._head = head.encoded("cmpl-", "text_completion")
        self._options = job.options.reply
        self._requests = job.requests
        self._prompt_texts = job.prompt_texts
        self._generation = generation
        self._tokenizer = tokenizer
        self._format = LogprobFormat(tokenizer, names_are_ids=self._options.names_are_ids)
        self._prefix = b"data: " + self._head + b',"choices":[{"index":'
        self._num_sent = 0  # tokens in frames, where frames have the usage

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """A frame for each choice with new tokens, even without text, so that clients can time them; after the last
        news of all also the end of the stream."""
        chunk = usage = b""
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
            chunk += b",%b]%b}\n\n" % (encode(fields)[1:], usage)
        if self._generation.finished:
            chunk += ending(b"data: " + self._head, self._options, self._generation.usage)
        return chunk

    def body(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The whole reply; one complete delta per choice, in order of their index."""
        choices = []
        for delta in deltas:
            wanted, with_ids = self._options.num_prompt_logprobs, self._options.token_ids
            positions = self._generation.prompt_logprobs.get(delta.prompt, ())
            choice = {
                "index": delta.index,
                "text": self._text(delta),
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                "prompt_logprobs": None if wanted is None else self._format.prompt(positions, wanted),
                "prompt_token_ids": self._requests[delta.prompt].prompt_token_ids if with_ids else None,
                "token_ids": delta.token_ids if with_ids else None,
            }
            choices.append(choice | score_field(delta))
        return self._head + b',"choices":' + encode(choices) + usage_field(self._generation.usage) + b"}"

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error)

    def _text(self, delta: ChoiceDelta) -> str:
        if self._options.echo and delta.is_first:
            return self._prompt_texts[delta.prompt] + delta.text
        return delta.text

    def _logprobs(self, delta: ChoiceDelta) -> CompletionArrays | None:
        wanted = self._options.num_logprobs
        if wanted is None:
            return None
        if not self._options.echo:
            return self._format.completion(delta.logprobs, (), delta.offsets, wanted)
        shift = len(self._prompt_texts[delta.prompt])
        offsets = [shift + offset for offset in delta.offsets]
        if not delta.is_first:
            return self._format.completion(delta.logprobs, (), offsets, wanted)
        prompt_ids = self._requests[delta.prompt].prompt_token_ids
        positions = (*self._generation.prompt_logprobs.get(delta.prompt, ()), *delta.logprobs)
        begins = self._prompt_offsets(prompt_ids, self._prompt_texts[delta.prompt])
        return self._format.completion(positions, prompt_ids, begins + offsets, wanted)

    def _prompt_offsets(self, prompt_ids: Sequence[int], text: str) -> list[int]:
        """Where in the prompt's text each token begins. Special tokens that the text does not show take no room."""
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=False)
        offsets, end = [], 0
        for token_id in prompt_ids:
            offsets.append(end)
            if token_id in self._tokenizer.special_ids and not text.startswith(
                self._tokenizer.token_text(token_id), end
            ):
                continue
            end += len(detokenizer.push((token_id,)))
        return offsets

"""Renders replies of /v1/chat/completions as JSON bytes, whole or as frames of a stream.

A frame of plain text costs one escape and two concatenations; the pieces of a tool call add up to the whole call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Generation
from quire_server.answering.prepare import Job
from quire_server.answering.rendering import (
    PLAIN_END,
    ReplyHead,
    closing_fields,
    encode,
    ending,
    last_timings,
    progress_frames,
    score_field,
    timings_field,
    usage_field,
)
from quire_server.dialects.completions.rendering import chat_pieces, prompt_pieces
from quire_server.errors import ApiError
from quire_server.http.json_text import Pieces, pieces_of_ids, pieces_of_object, pieces_of_parts
from quire_server.http.sse import error_frames
from quire_server.text.logprobs import LogprobFormat
from quire_server.text.parsing.calls import CallDelta
from quire_server.text.parsing.parsed_reply import whole_calls
from quire_server.text.tokenizer import TextTokenizer

# Clients of OpenAI and vLLM may read these fields without checking for them.
_ABSENT_IN_MESSAGES = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))


class ChatRenderer:
    """The renderer for /v1/chat/completions. There is one prompt, so its fields stand beside the choices."""

    def __init__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> None:
        self._head = head.encoded("chatcmpl-", "chat.completion")
        self._chunk_start = b"data: " + head.encoded("chatcmpl-", "chat.completion.chunk")
        self._options = job.options.reply
        self._shows_reasoning = job.options.reasoning.show
        self._request = job.requests[0]
        self._generation = generation
        self._format = LogprobFormat(tokenizer, names_are_ids=self._options.names_are_ids)
        self._prefix = self._chunk_start + b',"choices":[{"index":'
        self._is_first = True
        self._num_sent = 0  # tokens in frames so far, for the usage in every frame

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Render deltas as completions do; a choice begins with a frame that has its role and no token."""
        chunk = progress_frames(self._generation, self._request.n, self._prefix, b',"delta":{}')
        usage = b""
        for delta in deltas:
            if delta.is_first:
                if self._options.usage_always:
                    usage = usage_field(self._generation.usage, self._num_sent)
                chunk += b'%b%d,"delta":{"role":"assistant","content":%b}%b%b%b}\n\n' % (
                    self._prefix,
                    delta.index,
                    encode(self._options.begins_with),
                    PLAIN_END,
                    usage,
                    self._prompt_ids(),
                )
            if self._options.usage_always:
                self._num_sent += len(delta.token_ids)
                usage = usage_field(self._generation.usage, self._num_sent)
            if delta.calls or delta.reasoning:
                message = self._message_delta(delta)
            elif delta.text or not delta.finish_reason:  # also without new text, so that clients can time every token
                message = b'{"content":' + encode(delta.text) + b"}"
            else:
                message = b"{}"
            chunk += b'%b%d,"delta":%b' % (self._prefix, delta.index, message)
            if delta.finish_reason is None and self._options.num_logprobs is None and not self._options.token_ids:
                chunk += b"%b%b}\n\n" % (PLAIN_END, usage)
                continue
            fields = closing_fields(self._logprobs(delta), delta)
            if self._options.token_ids:
                fields["token_ids"] = delta.token_ids
            timings = last_timings(self._options, self._generation, is_last=delta is deltas[-1])
            chunk += b",%b]%b%b}\n\n" % (encode(fields)[1:], usage, timings)
        if self._generation.finished:
            chunk += ending(self._chunk_start, self._options, self._generation)
        return chunk

    def around_text(self) -> tuple[bytes, bytes] | None:
        options = self._options
        if options.usage_always or options.num_logprobs is not None or options.token_ids:
            return None
        return self._prefix + b'0,"delta":{"content":', b"}" + PLAIN_END + b"}\n\n"

    def body(self, deltas: Sequence[ChoiceDelta]) -> Iterator[bytes]:
        """The whole reply from one complete delta per choice, in the order of their index."""
        wanted, with_ids = self._options.num_prompt_logprobs, self._options.token_ids
        positions = self._generation.prompt_logprobs.get(0, ())
        fields = {
            "choices": Pieces(pieces_of_parts(pieces_of_object(self._choice(delta)) for delta in deltas)),
            "service_tier": None,
            "prompt_logprobs": None if wanted is None else prompt_pieces(self._format, positions, wanted),
            "prompt_token_ids": Pieces(pieces_of_ids(self._request.prompt_token_ids)) if with_ids else None,
        }
        yield self._head
        yield from pieces_of_object(fields, begin=b",", end=b"")
        yield usage_field(self._generation.usage) + timings_field(self._options, self._generation) + b"}"

    def _choice(self, delta: ChoiceDelta) -> dict[str, object]:
        """A choice of a whole reply."""
        wanted = self._options.num_logprobs
        return {
            "index": delta.index,
            "message": self._message(delta),
            "logprobs": None if wanted is None else chat_pieces(self._format, delta.logprobs, wanted),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self._options.token_ids else None,
        } | score_field(delta)

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error)

    def _logprobs(self, delta: ChoiceDelta) -> object:
        wanted = self._options.num_logprobs
        return None if wanted is None else self._format.chat(delta.logprobs, wanted)

    def _message_delta(self, delta: ChoiceDelta) -> bytes:
        """The `delta` object of a streamed choice with reasoning or calls."""
        fields: dict[str, object] = {}
        if delta.reasoning and self._shows_reasoning:
            fields |= _reasoning_fields(delta.reasoning)
        if delta.text or (not delta.calls and not fields):
            fields["content"] = delta.text
        if delta.calls:
            fields["tool_calls"] = [_call_delta(call) for call in delta.calls]
        return encode(fields)

    def _message(self, delta: ChoiceDelta) -> dict[str, object]:
        calls = whole_calls(delta.calls)
        text = self._options.begins_with + delta.text
        message: dict[str, object] = {"role": "assistant", "content": text, **_ABSENT_IN_MESSAGES}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        if delta.reasoning and self._shows_reasoning:
            message |= _reasoning_fields(delta.reasoning)
        return message

    def _prompt_ids(self) -> bytes:
        """The prompt's ids, in the stream's first frame only."""
        if not (self._options.token_ids and self._is_first):
            return b""
        self._is_first = False
        return b',"prompt_token_ids":' + encode(self._request.prompt_token_ids)


def _reasoning_fields(text: str) -> dict[str, object]:
    """The reasoning under both names: vLLM's clients read the first, DeepSeek's and others the second."""
    return {"reasoning": text, "reasoning_content": text}


def _call_delta(call: CallDelta) -> dict[str, object]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }

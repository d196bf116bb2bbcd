"""Replies as JSON bytes: whole ones, and the server-sent frames of streamed ones, for both endpoints.

Promises: a frame of plain text costs one escape and two concatenations; id, created and model are equal in all
frames. Must not know: sockets, the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec

from quire_engine.config import EnginePlan
from quire_server.answering.generation import ChoiceDelta, Generation, Usage
from quire_server.answering.options import ReplyOptions
from quire_server.answering.prepare import Job
from quire_server.errors import ApiError
from quire_server.http.sse import DONE, error_frames
from quire_server.text.detokenizer import Detokenizer
from quire_server.text.logprobs import CompletionArrays, LogprobFormat
from quire_server.text.tokenizer import TextTokenizer

_encode = msgspec.json.Encoder().encode
# A client of OpenAI's or vLLM's may read them without asking whether they are there.
_ABSENT_IN_MESSAGES = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
_PLAIN_END = b',"logprobs":null,"finish_reason":null}]'


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """What is the same in every part of a reply."""

    id: str  # without the dialect's prefix
    created: int  # seconds since the epoch
    model: str
    system_fingerprint: str

    def encoded(self, prefix: str, kind: str) -> bytes:
        """The fields as the beginning of a JSON object, without its end."""
        fields = {
            "id": prefix + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        return _encode(fields)[:-1]


_VERSION = version("quire")  # reads files: not for every request


def fingerprint(plan: EnginePlan) -> str:
    """Changes when the same request could get another answer: with version, model, device, types or kernels.

    Wherever the model lies: two servers of one kind say the same.
    """
    identity = (
        *(_VERSION, Path(plan.model).name, plan.architecture, plan.num_parameters),
        *(plan.device, plan.dtype, plan.kernels, plan.quantization, plan.kv_cache_dtype),
        plan.deterministic,
    )
    return "fp_" + hashlib.sha256(repr(identity).encode()).hexdigest()[:12]


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
                usage = _usage_field(self._generation.usage, self._num_sent)
            text = self._text(delta)
            chunk += b'%b%d,"text":%b' % (self._prefix, delta.index, _encode(text))
            if delta.finish_reason is None and self._options.num_logprobs is None and not self._options.token_ids:
                chunk += b"%b%b}\n\n" % (_PLAIN_END, usage)
                continue
            fields = _closing_fields(self._logprobs(delta), delta)
            if self._options.token_ids:
                if delta.is_first:
                    fields["prompt_token_ids"] = self._requests[delta.prompt].prompt_token_ids
                fields["token_ids"] = delta.token_ids
            chunk += b",%b]%b}\n\n" % (_encode(fields)[1:], usage)
        if self._generation.finished:
            chunk += _ending(b"data: " + self._head, self._options, self._generation.usage)
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
            choices.append(choice)
        return self._head + b',"choices":' + _encode(choices) + _usage_field(self._generation.usage) + b"}"

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


class ChatRenderer:
    """The shapes of /v1/chat/completions. There is one prompt, so its parts stand beside the choices."""

    def __init__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> None:
        self._head = head.encoded("chatcmpl-", "chat.completion")
        self._chunk_start = b"data: " + head.encoded("chatcmpl-", "chat.completion.chunk")
        self._options = job.options.reply
        self._request = job.requests[0]
        self._generation = generation
        self._format = LogprobFormat(tokenizer, names_are_ids=self._options.names_are_ids)
        self._prefix = self._chunk_start + b',"choices":[{"index":'
        self._is_first = True
        self._num_sent = 0  # tokens in frames, where frames have the usage

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """As of completions; a choice begins with a frame that has its role and no token."""
        chunk = usage = b""
        for delta in deltas:
            if delta.is_first:
                if self._options.usage_always:
                    usage = _usage_field(self._generation.usage, self._num_sent)
                chunk += b'%b%d,"delta":{"role":"assistant","content":""}%b%b%b}\n\n' % (
                    self._prefix,
                    delta.index,
                    _PLAIN_END,
                    usage,
                    self._prompt_ids(),
                )
            if self._options.usage_always:
                self._num_sent += len(delta.token_ids)
                usage = _usage_field(self._generation.usage, self._num_sent)
            content = b'{"content":' + _encode(delta.text) + b"}" if delta.text or not delta.finish_reason else b"{}"
            chunk += b'%b%d,"delta":%b' % (self._prefix, delta.index, content)
            if delta.finish_reason is None and self._options.num_logprobs is None and not self._options.token_ids:
                chunk += b"%b%b}\n\n" % (_PLAIN_END, usage)
                continue
            fields = _closing_fields(self._logprobs(delta), delta)
            if self._options.token_ids:
                fields["token_ids"] = delta.token_ids
            chunk += b",%b]%b}\n\n" % (_encode(fields)[1:], usage)
        if self._generation.finished:
            chunk += _ending(self._chunk_start, self._options, self._generation.usage)
        return chunk

    def body(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The whole reply; one complete delta per choice, in order of their index."""
        choices, with_ids = [], self._options.token_ids
        for delta in deltas:
            choice = {
                "index": delta.index,
                "message": {"role": "assistant", "content": delta.text, **_ABSENT_IN_MESSAGES},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                "token_ids": delta.token_ids if with_ids else None,
            }
            choices.append(choice)
        wanted = self._options.num_prompt_logprobs
        positions = self._generation.prompt_logprobs.get(0, ())
        fields = {
            "choices": choices,
            "service_tier": None,
            "prompt_logprobs": None if wanted is None else self._format.prompt(positions, wanted),
            "prompt_token_ids": self._request.prompt_token_ids if with_ids else None,
        }
        return self._head + b"," + _encode(fields)[1:-1] + _usage_field(self._generation.usage) + b"}"

    def failure(self, error: ApiError) -> bytes:
        return error_frames(error)

    def _logprobs(self, delta: ChoiceDelta) -> object:
        wanted = self._options.num_logprobs
        return None if wanted is None else self._format.chat(delta.logprobs, wanted)

    def _prompt_ids(self) -> bytes:
        """The prompt's ids, in the stream's first frame only."""
        if not (self._options.token_ids and self._is_first):
            return b""
        self._is_first = False
        return b',"prompt_token_ids":' + _encode(self._request.prompt_token_ids)


def _closing_fields(logprobs: object, delta: ChoiceDelta) -> dict[str, object]:
    """The fields of a streamed choice after its text."""
    fields: dict[str, object] = {"logprobs": logprobs, "finish_reason": delta.finish_reason}
    if delta.finish_reason is not None:
        fields["stop_reason"] = delta.stop_reason
    return fields


def _ending(start: bytes, options: ReplyOptions, usage: Usage) -> bytes:
    """What follows the last choice: the usage where it was asked for, and the end mark."""
    if not options.usage_at_end:
        return DONE
    return start + b',"choices":[]' + _usage_field(usage) + b"}\n\n" + DONE


def _usage_field(usage: Usage, completion_tokens: int | None = None) -> bytes:
    """`completion_tokens` are those of the reply up to here; left out, all of them."""
    if completion_tokens is None:
        completion_tokens = usage.completion_tokens
    return (
        b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d}}'
    ) % (
        usage.prompt_tokens,
        completion_tokens,
        usage.prompt_tokens + completion_tokens,
        usage.cached_tokens,
    )

"""Renders replies of /infill as JSON bytes in llama-server's form.

A stream's last frame has no content and the reason of the end; there is no other end mark.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire_server.answering.choice import ChoiceDelta
from quire_server.answering.generation import Generation
from quire_server.answering.prepare import Job
from quire_server.answering.rendering import ReplyHead, timings_of
from quire_server.errors import ApiError, error_body
from quire_server.text.tokenizer import TextTokenizer

_encode = msgspec.json.Encoder().encode


class InfillRenderer:
    """The renderer for /infill, whose requests have one prompt and one choice."""

    def __init__(self, head: ReplyHead, job: Job, generation: Generation, *, tokenizer: TextTokenizer) -> None:
        self._model = head.model
        self._shows_tokens = job.options.reply.token_ids
        self._shows_timings = job.options.reply.timings
        self._prompt_ids = job.requests[0].prompt_token_ids
        self._generation = generation
        self._tokenizer = tokenizer
        self._num_sent = 0

    def frames(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """A frame for each delta with tokens or text, and one for the end."""
        chunk = b""
        for delta in deltas:
            self._num_sent += len(delta.token_ids)
            if delta.text or delta.finish_reason is None:
                chunk += _frame(self._part(delta.text, delta.token_ids, self._num_sent, stop=False))
            if delta.finish_reason is not None:
                chunk += _frame(self._part("", [], self._num_sent, stop=True) | self._end(delta))
        return chunk

    def body(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The whole reply."""
        (delta,) = deltas
        tokens = delta.token_ids if self._shows_tokens else []
        return _encode(self._part(delta.text, tokens, len(delta.token_ids), stop=True) | self._end(delta))

    def around_text(self) -> None:
        """Frames are of other parts."""

    def failure(self, error: ApiError) -> bytes:
        """The error in its envelope."""
        return _frame(error_body(error))

    def _part(self, text: str, tokens: Sequence[int], num_tokens: int, *, stop: bool) -> dict[str, object]:
        return {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "stop": stop,
            "id_slot": -1,
            "tokens_predicted": num_tokens,
            "tokens_evaluated": len(self._prompt_ids),
        }

    def _end(self, delta: ChoiceDelta) -> dict[str, object]:
        word = delta.stop_reason if isinstance(delta.stop_reason, str) else ""
        kinds = {"stop": "word" if word else "eos", "length": "limit"}
        return {
            "model": self._model,
            "prompt": self._tokenizer.decode(self._prompt_ids, skip_special_tokens=False),
            "truncated": False,
            "stop_type": kinds.get(delta.finish_reason or "", "none"),
            "stopping_word": word,
            "tokens_cached": self._generation.usage.cached_tokens,
            **({"timings": timings_of(self._generation.summaries())} if self._shows_timings else {}),
        }


def _frame(fields: object) -> bytes:
    return b"data: " + _encode(fields) + b"\n\n"

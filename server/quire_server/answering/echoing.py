"""Streams the echo of a long prompt with log-probabilities in parts, before the generated text.

The parts together are the whole echo; each takes at most a few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from quire_engine.contract.types import GenerationRequest
from quire_server.answering.choice import ChoiceDelta, TextOptions
from quire_server.answering.generation import Generation
from quire_server.answering.prepare import Job
from quire_server.text.detokenizer import Detokenizer
from quire_server.text.tokenizer import TextTokenizer

TOKENS_AT_ONCE = 128  # a frame of 100 KB with 20 alternatives per token


def generation_class(job: Job) -> Callable[..., Generation]:
    """The generation to run a job's requests with; for a stream with a long echo, one that sends it in parts."""
    reply = job.options.reply
    if reply.stream and reply.echo and reply.num_logprobs is not None:
        return partial(EchoingGeneration, prompt_texts=job.prompt_texts)
    return Generation


def prompt_offsets(tokenizer: TextTokenizer, prompt_ids: Sequence[int], text: str) -> Iterator[int]:
    """The offset of each token in the prompt's text. Special tokens that the text does not show have no width."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    end = 0
    for token_id in prompt_ids:
        yield end
        if token_id in tokenizer.special_ids and not text.startswith(tokenizer.token_text(token_id), end):
            continue
        end += len(detokenizer.push((token_id,)))


class EchoingGeneration(Generation):
    """A generation in which the choices of a long prompt begin with its echo in parts."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        options: TextOptions,
        *,
        prompt_texts: Sequence[str],
        tokenizer: TextTokenizer,
        **parts: Any,
    ) -> None:
        """`parts`: the other arguments of `Generation`."""
        super().__init__(requests, options, tokenizer=tokenizer, **parts)
        self._prompt_texts = prompt_texts
        self._names = tokenizer

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta]]:
        """Yield deltas as `Generation` does, long echoes in parts; `finished` is set with the last deltas only."""
        async with aclosing(super().deltas()) as wakes:
            async for deltas in wakes:
                finished, self.finished = self.finished, False
                for at, delta in enumerate(deltas):
                    if delta.is_first and len(self.requests[delta.prompt].prompt_token_ids) > TOKENS_AT_ONCE:
                        for part in self._parts(delta):
                            yield [part]
                            await asyncio.sleep(0)
                        deltas[at] = replace(delta, is_first=False)
                self.finished = finished
                yield deltas

    def _parts(self, delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
        prompt_ids, text = self.requests[delta.prompt].prompt_token_ids, self._prompt_texts[delta.prompt]
        positions = self.prompt_logprobs.get(delta.prompt, ())
        begins = prompt_offsets(self._names, prompt_ids, text)
        offsets = [next(begins)]
        for at in range(0, len(prompt_ids), TOKENS_AT_ONCE):
            for _ in range(min(TOKENS_AT_ONCE, len(prompt_ids) - at)):
                offsets.append(next(begins, len(text)))  # the last is where the part ends
            yield ChoiceDelta(
                index=delta.index,
                prompt=delta.prompt,
                is_first=at == 0,
                text=text[offsets[0] : offsets[-1]],
                offsets=offsets[:-1],
                echoed=positions[at : at + TOKENS_AT_ONCE],
            )
            offsets = offsets[-1:]

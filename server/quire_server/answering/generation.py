"""One HTTP request's generation: engine requests in, pieces of text per choice out.

Owns each choice's detokenizer and stop matcher and the usage; promises that the engine's work ends with the generator,
however that ends. Must not know: HTTP, JSON, sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from quire_engine.types import GenerationRequest, TokenLogprobs, TokenOutput
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.errors import EngineFailed
from quire_server.metrics.metrics import Metrics, RequestRecord
from quire_server.text.detokenizer import Detokenizer
from quire_server.text.stop_strings import StopMatcher
from quire_server.text.tokenizer import TextTokenizer

ChoiceFinish = Literal["stop", "length", "abort"]
Outcome = Literal["stop", "length", "abort", "error"]
Arrivals = list[tuple[int, list[TokenOutput]]]  # (number of the prompt, its outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How tokens become text; the same for all choices of a request."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0  # stop strings that these first tokens complete do not count
    skip_special_tokens: bool = True
    interval: int = 1  # tokens per delta; the first and the last come at once


@dataclass(slots=True, kw_only=True)
class ChoiceDelta:
    """What is new of one choice since its last delta. The lists are the receiver's."""

    index: int  # number of the prompt * n + number of the choice
    prompt: int
    is_first: bool = False
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, or empty
    offsets: list[int] = field(default_factory=list)  # with logprobs: characters of the choice's text before each token
    finish_reason: ChoiceFinish | None = None
    stop_reason: str | int | None = None  # the stop string or token id; None for the end-of-text token


@dataclass(slots=True, kw_only=True)
class Usage:
    """Tokens so far. Tokens that the engine made after a stop string's match are not counted."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


class Generation:
    """The prompts of one HTTP request, each with n choices. `deltas` may be iterated once."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        options: TextOptions,
        *,
        tokenizer: TextTokenizer,
        client: EngineClient,
        metrics: Metrics,
    ) -> None:
        self.requests = tuple(requests)
        self.usage = Usage(prompt_tokens=sum(len(request.prompt_token_ids) for request in requests))
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}  # by prompt, once known
        self.finished = False  # every choice has its finish reason
        self._client = client
        self._metrics = metrics
        self._interval = options.interval
        self._cached = [0] * len(requests)
        self._prompts = [
            [
                _Choice(ChoiceDelta(index=number * request.n + i, prompt=number), request, options, tokenizer)
                for i in range(request.n)
            ]
            for number, request in enumerate(requests)
        ]

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta]]:
        """What is new, once per wake-up and at most one delta per choice. The generator must be closed.

        Raises QueueFull or NotReady before the first item, EngineFailed at any time.
        """
        streams: list[RequestStream] = []
        records: list[RequestRecord] = []
        failed = False
        try:
            for request in self.requests:
                streams.append(self._client.submit(request))
                records.append(
                    self._metrics.start(
                        prompt_tokens=len(request.prompt_token_ids),
                        max_tokens=request.stop.max_new_tokens,
                        n=request.n,
                    )
                )
            async with aclosing(_merge(streams)) as wakes:
                async for arrivals in wakes:
                    for prompt, outputs in arrivals:
                        self._absorb(prompt, outputs, records[prompt])
                        if all(choice.finish_reason for choice in self._prompts[prompt]):
                            streams[prompt].close()
                    deltas = [
                        delta
                        for prompt, _ in arrivals
                        for choice in self._prompts[prompt]
                        if (delta := choice.take(self._interval)) is not None
                    ]
                    self.finished = all(choice.finish_reason for choices in self._prompts for choice in choices)
                    if deltas:
                        yield deltas
                    if self.finished:
                        return
            raise EngineFailed("The engine ended the request early.")
        except EngineFailed:
            failed = True
            raise
        finally:
            for stream in streams:
                stream.close()
            for record, choices in zip(records, self._prompts, strict=False):
                record.finish(_outcome(choices, failed))

    def _absorb(self, prompt: int, outputs: Sequence[TokenOutput], record: RequestRecord) -> None:
        now = time.monotonic()
        for output in outputs:
            if output.finish == "error":
                raise EngineFailed(output.error or "The engine failed.", culprit=output.culprit)
            if output.num_cached_tokens > self._cached[prompt]:
                record.cached(output.num_cached_tokens)
                self.usage.cached_tokens += output.num_cached_tokens - self._cached[prompt]
                self._cached[prompt] = output.num_cached_tokens
            if output.prompt_logprobs is not None:
                self.prompt_logprobs[prompt] = output.prompt_logprobs
            if output.timing is not None:
                record.timing(output.timing)
            count = self._prompts[prompt][output.choice].absorb(output)
            if count:
                self.usage.completion_tokens += count
                record.tokens(output.choice, count, now)


class _Choice:
    """Turns one choice's tokens into text and decides where it ends."""

    def __init__(
        self, delta: ChoiceDelta, request: GenerationRequest, options: TextOptions, tokenizer: TextTokenizer
    ) -> None:
        self.finish_reason: ChoiceFinish | None = None
        self._new = delta
        self._is_opened = False
        self._is_closed = False
        self._num_tokens = 0
        self._num_unsent = 0
        self._num_chars = 0
        self._min_tokens = options.min_tokens
        self._include_stop = options.include_stop
        self._silent_stop_ids = frozenset(tokenizer.eos_token_ids)
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            prompt_ids=request.prompt_token_ids,
        )
        self._matcher = StopMatcher(options.stop, options.include_stop) if options.stop else None

    def absorb(self, output: TokenOutput) -> int:
        """Take in one output; returns how many of its tokens belong to the choice. None after a stop string."""
        if self.finish_reason is not None:
            return 0
        # A stop token ends the text but is not part of it, unless the client asks for it.
        hidden = 1 if output.stop_token_id is not None and not self._include_stop else 0
        pieces = self._detokenizer.push_each(output.token_ids[: len(output.token_ids) - hidden])
        pieces.extend([""] * hidden)
        count = 0
        for count, piece in enumerate(pieces, start=1):  # noqa: B007 - read after the loop
            self._num_tokens += 1
            if output.logprobs is not None:
                self._new.offsets.append(self._num_chars)
                self._num_chars += len(piece)
            self._show(piece)
            if self.finish_reason is not None:
                break
        self._num_unsent += count
        self._new.token_ids.extend(output.token_ids[:count])
        if output.logprobs is not None:
            self._new.logprobs.extend(output.logprobs[:count])
        if output.finish is not None and self.finish_reason is None:
            self._end(output)
        return count

    def take(self, interval: int) -> ChoiceDelta | None:
        """The delta that is due now, if any."""
        is_due = self.finish_reason is not None or not self._is_opened or self._num_unsent >= interval
        if not is_due or self._is_closed or (self._num_tokens == 0 and self.finish_reason is None):
            return None
        delta = self._new
        delta.is_first = not self._is_opened
        self._is_opened = True
        self._is_closed = self.finish_reason is not None
        self._num_unsent = 0
        self._new = ChoiceDelta(index=delta.index, prompt=delta.prompt)
        return delta

    def _show(self, piece: str) -> None:
        if self._matcher is None:
            self._new.text += piece
            return
        shown, stop = self._matcher.push(piece, examine=self._num_tokens > self._min_tokens)
        self._new.text += shown
        if stop is not None:
            self._finish("stop", stop)

    def _end(self, output: TokenOutput) -> None:
        """The engine has ended the choice; what was held back comes out, and may itself complete a stop string."""
        self._show(self._detokenizer.finish())
        if self.finish_reason is not None:
            return
        if self._matcher is not None:
            self._new.text += self._matcher.finish()
        stop_id = output.stop_token_id
        self._finish(
            output.finish if output.finish in {"stop", "abort"} else "length",
            None if stop_id in self._silent_stop_ids else stop_id,
        )

    def _finish(self, reason: ChoiceFinish, stop_reason: str | int | None) -> None:
        self.finish_reason = self._new.finish_reason = reason
        self._new.stop_reason = stop_reason


async def _merge(streams: Sequence[RequestStream]) -> AsyncGenerator[Arrivals]:
    """All streams as one: everything that has arrived, per wake-up."""
    if len(streams) == 1:
        async for outputs in streams[0]:
            yield [(0, outputs)]
        return
    arrived: asyncio.Queue[tuple[int, list[TokenOutput]]] = asyncio.Queue()

    async def pump(number: int, stream: RequestStream) -> None:
        try:
            async for outputs in stream:
                arrived.put_nowait((number, outputs))
        finally:
            arrived.put_nowait((number, []))

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_open = len(pumps)
        while num_open:
            wake = [await arrived.get()]
            while not arrived.empty():
                wake.append(arrived.get_nowait())
            num_open -= sum(1 for _, outputs in wake if not outputs)
            if merged := [item for item in wake if item[1]]:
                yield merged
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _outcome(choices: Sequence[_Choice], failed: bool) -> Outcome:
    """How a request ended, for its record: an unfinished choice means that nobody waited for it any more."""
    reasons = {choice.finish_reason for choice in choices}
    if failed:
        return "error"
    if None in reasons or "abort" in reasons:
        return "abort"
    return "length" if "length" in reasons else "stop"

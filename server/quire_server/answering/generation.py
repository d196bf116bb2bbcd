"""One HTTP request's generation: runs its engine requests and yields deltas of text per choice.

When the generator ends, for any reason, its engine requests end too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from quire_engine.contract.types import DEADLINE_EXCEEDED, OF_THE_REQUEST, GenerationRequest, TokenLogprobs, TokenOutput
from quire_server.answering.choice import Choice, ChoiceDelta, TextOptions
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.errors import (
    AbortedByOperator,
    ApiError,
    BadRequest,
    DeadlineExceeded,
    EngineFailed,
    ReplicaLost,
    RequestCancelled,
    ShuttingDown,
)
from quire_server.metrics.metrics import Metrics
from quire_server.metrics.request_record import RequestRecord, RequestSummary
from quire_server.text.tokenizer import TextTokenizer

_ERRORS: dict[str, Callable[[], ApiError]] = {
    each.default_code: each
    for each in (DeadlineExceeded, AbortedByOperator, RequestCancelled, ShuttingDown, ReplicaLost)
}


def error_of(output: TokenOutput) -> ApiError:
    """The error of an output whose `finish` is "error", for whole replies, streams and embeddings."""
    known = _ERRORS.get(output.error_code)
    if known is not None:
        return known()
    error = output.error or "The engine failed."
    if error.startswith(OF_THE_REQUEST):
        return BadRequest(f"With what this request asks for, {error}.")
    return EngineFailed(error, culprit=output.culprit)


_encode = msgspec.json.Encoder().encode
Outcome = Literal["stop", "length", "abort", "error"]
_LEAST_WAITING = 8  # fewest unread tokens per choice that mean a slow reader and not just a late event loop


@dataclass(slots=True, kw_only=True)
class Usage:
    """Token counts so far. Tokens after a stop string's match are not counted."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # part of the completion tokens; None: reasoning is not parsed
    accepted_tokens: int | None = None  # with a prediction: guessed tokens that were right; None: there is none
    rejected_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptNews:
    """How far a prompt is computed; counts are tokens."""

    prompt: int  # its number
    total: int
    cached: int
    computed: int  # with the cached ones
    seconds: float  # since the computation began


class Way(Protocol):
    """The way to the client: `http.sse`'s, of one event stream."""

    def is_clear(self) -> bool: ...
    def write_now(self, chunk: bytes) -> None: ...


class Lane:
    """The fast lane of a stream: a token goes from the engine's step to its connection, with no task in between.

    The lane serves the outputs between the first and the last of a stream with one choice, while everything before is
    on its way to the client; all others wait for the stream's task, as where there is no lane. Both write the same
    bytes: what an output means, and how it is rendered, is one code.
    """

    __slots__ = ("_absorb", "_choice", "_frames", "_plain", "_prompt", "_way")

    def __init__(
        self,
        way: Way,
        prompt: _Prompt,
        absorb: Callable[[TokenOutput, float], object],
        frames: Callable[[Sequence[ChoiceDelta]], bytes],
        *,
        plain: Callable[[TokenOutput, float], bytes] | None,
    ) -> None:
        """`absorb`: takes in an output at a time; `frames`: renders deltas; `plain`: does both for a token whose frame
        has its text and nothing else of its own; None: the stream's frames have more.
        """
        self._way, self._prompt, self._absorb = way, prompt, absorb
        self._choice = prompt.choices[0]
        self._frames, self._plain = frames, plain

    def __call__(self, output: TokenOutput) -> bool:
        """Pass an output on; False: it is for the stream's task, and nothing of it was taken in."""
        if output.finish is not None or output.timing is not None or not (output.token_ids and self._way.is_clear()):
            return False
        is_plain = output.num_cached_tokens <= self._prompt.num_cached_tokens and output.predicted is None
        if self._plain is not None and is_plain:
            self._way.write_now(self._plain(output, time.monotonic()))
            return True
        self._absorb(output, time.monotonic())
        delta = self._choice.take()
        if delta is not None:
            self._way.write_now(self._frames((delta,)))
        return True


class Generation:
    """The generation of one HTTP request's prompts, with n choices each. `deltas` may be iterated once.

    Backpressure: with `max_waiting`, the engine holds the requests once so many tokens wait for the reader.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        options: TextOptions,
        *,
        tokenizer: TextTokenizer,
        client: EngineClient,
        metrics: Metrics,
        max_waiting: int | None = None,
    ) -> None:
        self.requests = tuple(requests)
        self.usage = Usage(
            prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
            reasoning_tokens=0 if options.counts_thoughts else None,
            accepted_tokens=0 if any(request.prediction for request in requests) else None,
        )
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}  # by prompt number
        self.finished = False  # whether every choice has its finish reason
        self.prompt_news: list[PromptNews] = []  # not rendered yet; empty where the client has not asked for them
        self._records: list[RequestRecord] = []
        self._options = options
        self._tokenizer = tokenizer
        self._client = client
        self._metrics = metrics
        # None: it is not streamed.
        self._way: tuple[Way, Callable[[Sequence[ChoiceDelta]], bytes], tuple[bytes, bytes] | None] | None = None
        self._max_waiting = None if max_waiting is None else max(max_waiting, _LEAST_WAITING * self._num_choices())

    def summaries(self) -> list[RequestSummary]:
        """The records of the prompts, as far as they have come."""
        return [record.summary() for record in self._records]

    def _num_choices(self) -> int:
        return sum(request.n for request in self.requests)

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta]]:
        """The new content, once per wake-up and at most one delta per choice. The generator must be closed.

        An item is empty where there is news of prompts alone.

        Raises QueueFull and BudgetSpent before the first item; EngineFailed, NotReady and DeadlineExceeded at any time;
        BadRequest where the request's own rules leave no token to generate.
        """
        self._client.check_budgets(self.requests)
        stream = RequestStream(self._client, max_waiting=self._max_waiting)
        prompts: dict[str, _Prompt] = {}
        failed = False
        try:
            await self._submit(stream, prompts)
            stream.lane = self._lane(prompts)
            num_open = self._num_choices()
            async for outputs in stream:
                now = time.monotonic()
                news: dict[Choice, _Prompt] = {}
                for output in outputs:
                    prompt = prompts[output.request_id]
                    news[self._absorb(output, prompt, now)] = prompt
                deltas = []
                for choice, prompt in news.items():
                    delta = choice.take()
                    if delta is None:
                        continue
                    deltas.append(delta)
                    if delta.finish_reason is not None:
                        num_open -= 1
                        prompt.num_open -= 1
                        if prompt.num_open == 0:  # all choices may end by stop strings, which the engine does not have
                            stream.abort(prompt.request_id)
                self.finished = num_open == 0
                if deltas or self.prompt_news:
                    yield deltas
                if self.finished:
                    return
            raise EngineFailed("The engine ended the request early.")
        except (EngineFailed, ReplicaLost, BadRequest):
            failed = True
            raise
        finally:
            stream.close()
            for prompt in prompts.values():
                prompt.record.finish(_outcome(prompt.choices, failed))

    def way(
        self,
        way: Way,
        frames: Callable[[Sequence[ChoiceDelta]], bytes],
        around: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Set where a stream's frames go and what renders them; to be called before `deltas` is iterated.

        `around`: the bytes before and after the text's JSON in a frame after the first one, if these are all of it.
        """
        self._way = way, frames, around

    def _lane(self, prompts: dict[str, _Prompt]) -> Lane | None:
        """The fast lane of a stream with one choice. Stop strings may end a choice anywhere, which is for the task."""
        if self._way is None or self._num_choices() != 1 or self._options.stop:
            return None
        (prompt,), (way, frames, around) = prompts.values(), self._way
        plain = None
        if around is not None and prompt.choices[0].is_plain and self.usage.reasoning_tokens is None:
            plain = self._plain(prompt, *around)
        return Lane(way, prompt, lambda output, now: self._absorb(output, prompt, now), frames, plain=plain)

    def _plain(self, prompt: _Prompt, before: bytes, after: bytes) -> Callable[[TokenOutput, float], bytes]:
        """Takes in an output and renders its frame, for a choice whose tokens are text and nothing else."""
        usage, record, take = self.usage, prompt.record, prompt.choices[0].take_plain

        def plain(output: TokenOutput, now: float) -> bytes:
            count = len(output.token_ids)
            usage.completion_tokens += count
            record.tokens(0, count, now)
            return b"%b%b%b" % (before, _encode(take(output.token_ids)), after)

        return plain

    async def _submit(self, stream: RequestStream, prompts: dict[str, _Prompt]) -> None:
        """Queue all requests and add their prompts by id, those too that were queued before an error."""
        choices: list[list[Choice]] = []
        for number, request in enumerate(self.requests):
            if number:
                await asyncio.sleep(0)  # many prompts with stop strings take tens of milliseconds
            choices.append(self._choices(number, request))
        # In one turn: the places of a list in the queue are all taken before those of another.
        now = time.monotonic()
        async for request in self._client.place(self.requests, stream):
            number = len(prompts)
            prompts[request.request_id] = self._accepted(number, request, choices[number], now)

    def _choices(self, number: int, request: GenerationRequest) -> list[Choice]:
        return [
            Choice(ChoiceDelta(index=number * request.n + i, prompt=number), request, self._options, self._tokenizer)
            for i in range(request.n)
        ]

    def _accepted(self, number: int, request: GenerationRequest, choices: list[Choice], now: float) -> _Prompt:
        record = self._metrics.start(
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.stop.max_new_tokens,
            n=request.n,
            request_id=request.request_id,
            started=now,
        )
        self._records.append(record)
        return _Prompt(request_id=request.request_id, number=number, choices=choices, record=record, num_open=request.n)

    def _absorb(self, output: TokenOutput, prompt: _Prompt, now: float) -> Choice:
        """Take in one output; returns its choice."""
        if output.finish == "error":
            if output.error_code == DEADLINE_EXCEEDED:
                self._metrics.deadline_exceeded()
            raise error_of(output)
        record = prompt.record
        if output.num_cached_tokens > prompt.num_cached_tokens:
            record.cached(output.num_cached_tokens)
            self.usage.cached_tokens += output.num_cached_tokens - prompt.num_cached_tokens
            prompt.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs[prompt.number] = output.prompt_logprobs
        if output.timing is not None:
            record.timing(output.timing)
            if output.finish is None:
                request = self.requests[prompt.number]
                self._metrics.tenants.queued(request.tenant, output.timing.queue_seconds)
        if self.requests[prompt.number].tells_progress:
            self._note_progress(output, prompt)
        choice = prompt.choices[output.choice]
        count = choice.absorb(output)
        if count:
            self.usage.completion_tokens += count
            record.tokens(output.choice, count, now)
        if output.predicted is not None and self.usage.accepted_tokens is not None:
            guessed, accepted = output.predicted
            self.usage.accepted_tokens += accepted
            self.usage.rejected_tokens += guessed - accepted
        if self.usage.reasoning_tokens is not None:
            self.usage.reasoning_tokens += choice.num_new_thoughts
            choice.num_new_thoughts = 0
        return choice

    def _note_progress(self, output: TokenOutput, prompt: _Prompt) -> None:
        """Keep what an output tells of its prompt, which the first token completes; a preempted one does not go back.

        Progress after the first token is of a prompt that is computed again.
        """
        total, computed, seconds = len(self.requests[prompt.number].prompt_token_ids), prompt.num_computed, 0.0
        if output.progress is not None:
            computed, seconds = output.progress.num_computed, output.progress.seconds
        elif output.timing is not None:
            computed, seconds = total, output.timing.prefill_seconds
        if computed > prompt.num_computed:
            prompt.num_computed = computed
            cached = prompt.num_cached_tokens
            self.prompt_news.append(
                PromptNews(prompt=prompt.number, total=total, cached=cached, computed=computed, seconds=seconds)
            )


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """An accepted request with its choices."""

    request_id: str
    number: int
    choices: list[Choice]
    record: RequestRecord
    num_open: int  # choices without a finish reason
    num_cached_tokens: int = 0
    num_computed: int = 0  # prompt tokens that the client knows of


def _outcome(choices: Sequence[Choice], failed: bool) -> Outcome:
    """How a request ended, for its record: an unfinished choice means that the client has disconnected."""
    reasons = {choice.finish_reason for choice in choices}
    if failed:
        return "error"
    if None in reasons or "abort" in reasons:
        return "abort"
    return "length" if "length" in reasons else "stop"

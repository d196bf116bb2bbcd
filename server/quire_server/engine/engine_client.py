"""Passes requests to the engine and its outputs to the requests' streams.

Owns the bounded queue (admission control) and one buffer per stream. Promises: a place in the queue is reserved
atomically, a step wakes a stream once, and closing a stream aborts its live requests at once. Must not know: text,
HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import (
    DEADLINE_EXCEEDED,
    DEADLINE_PASSED,
    EnginePort,
    GenerationRequest,
    StepOutput,
    TokenOutput,
)
from quire_server.engine.admission import QueueLimits, RetryLine, SeatMeter, TenantGate, TtftGate
from quire_server.engine.budgets import LONGEST_SECONDS, Budget, budgets_of
from quire_server.engine.recovery import Quarantine
from quire_server.engine.tenants import Tenant
from quire_server.errors import BudgetSpent, DeadlineExceeded, QueueFull, RequestQuarantined, ShuttingDown
from quire_server.metrics.metrics import Metrics

_FEW = 1  # requests underway to a full queue that are not counted, since they may never reach it


def is_full(taken: int, seats: int, most: int, lately: int, underway: int) -> bool:
    """Whether a queue of `most` places with `taken` ones has none for a request that comes now.

    See `EngineClient.refusal` for the others.
    """
    soon = underway if taken >= seats else lately
    return taken + max(0, soon - _FEW) >= most


class RequestStream:
    """The outputs of accepted requests in the order of arrival; ends when none of the requests is live.

    Backpressure: with `max_waiting`, the requests are held once so many outputs wait in the buffer, until the consumer
    reads them.
    """

    def __init__(self, client: EngineClient, *, max_waiting: int | None = None) -> None:
        self._client = client
        self._live: dict[str, GenerationRequest] = {}
        self._num_unfinished: dict[str, int] = {}  # choices, by request
        self._buffer: list[TokenOutput] = []
        self._max_waiting = max_waiting
        self._is_held = False
        self._waiter: asyncio.Future[None] | None = None
        # Takes outputs for which the consumer waits; False: this one is for the consumer.
        self.lane: Callable[[TokenOutput], bool] | None = None
        self._failure: Exception | None = None  # of the lane

    def expect(self, request: GenerationRequest) -> None:
        """A request was accepted for this stream."""
        self._live[request.request_id] = request
        self._num_unfinished[request.request_id] = request.n

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> list[TokenOutput]:
        """All outputs since the last call; waits for the first one."""
        if self._is_held:
            self._is_held = False
            self._client.release_held(self._live.values())
        if not self._buffer:
            if not self._live:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            if self._failure is not None:
                raise self._failure
            if not self._buffer:
                raise StopAsyncIteration
        outputs, self._buffer = self._buffer, []
        return outputs

    def deliver(self, output: TokenOutput) -> None:
        """Append an output of a live request."""
        if self.lane is not None and self._waiter is not None and not self._buffer and not self._waiter.done():
            try:
                if self.lane(output):
                    return
            except Exception as error:  # of this stream's; others get their outputs
                self.lane, self._failure = None, error
                self._waiter.set_result(None)
                return
        self._buffer.append(output)
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self._max_waiting is not None and len(self._buffer) >= self._max_waiting and not self._is_held:
            self._is_held = True
            self._client.hold(self._live.values())
        if output.finish is not None:
            self.choice_ended(output.request_id)

    def choice_ended(self, request_id: str) -> None:
        """A choice of a live request has ended, and the request with its last one."""
        self._num_unfinished[request_id] -= 1
        if self._num_unfinished[request_id] == 0:
            self._client.release(self._live.pop(request_id), finished=True)

    def abort(self, request_id: str) -> None:
        """Abort a request, if it is live."""
        request = self._live.pop(request_id, None)
        if request is not None:
            self._client.release(request, finished=False)

    def dismiss(self, request_id: str) -> None:
        """A request was refused after all, by the process that has the queue."""
        request = self._live.pop(request_id, None)
        if request is not None:
            self._client.release(request, finished=True)

    def expire(self, request_id: str) -> None:
        """End a live request at its deadline."""
        self.fail(request_id, DEADLINE_PASSED, DEADLINE_EXCEEDED)

    def fail(self, request_id: str, error: str, code: str) -> None:
        """Abort a live request; its last output is an error of its first unfinished choice."""
        self._buffer.append(TokenOutput(request_id=request_id, finish="error", error=error, error_code=code))
        request = self._live.pop(request_id)
        self._client.release(request, finished=False)
        self._wake()

    @property
    def is_live(self) -> bool:
        """Whether one of its requests is unfinished."""
        return bool(self._live)

    def unread(self) -> list[TokenOutput]:
        """The unread outputs, which count as read from now on."""
        outputs, self._buffer = self._buffer, []
        return outputs

    def request(self, request_id: str) -> GenerationRequest:
        """A live request."""
        return self._live[request_id]

    def close(self) -> None:
        """Abort the live requests. Idempotent."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """Admission control, fan-out of outputs, and statistics in front of one `EnginePort`."""

    def __init__(
        self,
        port: EnginePort,
        *,
        plan: EnginePlan,
        limits: QueueLimits,
        seats: int | None = None,
        metrics: Metrics,
        tenants: TenantGate | None = None,
        ttft: TtftGate | None = None,
        quarantine: Quarantine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seats`: sequences that all engines compute at once; None: there is one engine, with its plan's."""
        self._num_seats = plan.scheduler.limits.max_num_seqs if seats is None else seats
        self._tenants = tenants
        self._ttft = ttft
        self._quarantine = Quarantine() if quarantine is None else quarantine
        self.plan = plan
        self._port = port
        self._limits = limits
        self._metrics = metrics
        self._streams: dict[str, RequestStream] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._closed = False
        self._sequences = 0
        self._held: dict[str, int] = {}  # sequences of held requests, by id
        self._num_held = 0  # sequences of held requests
        self._prompt_tokens = 0
        self._unanswered: dict[str, int] = {}  # prompt tokens of live requests without an output, by id
        self._clock = clock
        self._seats = SeatMeter(self._num_seats)
        self._retry_line = RetryLine()
        self.seconds_until_engine: Callable[[], float] = lambda: (
            0.0
        )  # where the engine may be absent: until it is there
        self._idle = asyncio.Event()
        self._idle.set()
        port.on_step = self.on_step

    @property
    def in_flight(self) -> int:
        """Accepted and unfinished requests."""
        return len(self._streams)

    @property
    def num_seats(self) -> int:
        """The sequences that all engines compute at once."""
        return self._num_seats

    @property
    def max_sequences(self) -> int:
        """The most choices, or beams, that may be accepted and unfinished at once."""
        return self._limits.max_sequences

    async def wait_idle(self) -> None:
        """Wait until no accepted request is unfinished."""
        await self._idle.wait()

    def resize(self, *, seats: int, max_sequences: int) -> None:
        """Engines have joined or left: so many sequences are computed at once, and so many may be unfinished."""
        self._num_seats = seats
        self._seats.resize(seats)
        self._limits = replace(self._limits, max_sequences=max_sequences)

    def live(self) -> list[GenerationRequest]:
        """Accepted and unfinished requests."""
        return [stream.request(request_id) for request_id, stream in self._streams.items()]

    def end(self, request_id: str, error: str, code: str) -> bool:
        """End an unfinished request with an error; False if there is none of this id."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.fail(request_id, error, code)
        return stream is not None

    def close(self) -> None:
        """Shut down: refuse new requests, and end unfinished ones with an error."""
        self._closed = True
        for request_id in list(self._streams):
            self.end(request_id, "the server is shutting down", ShuttingDown.default_code)

    def has_room(self, request: GenerationRequest) -> bool:
        """Whether `submit` would accept the request now."""
        return self._exceeded_limit(request) is None

    def change_tenants(self, tenants: Iterable[Tenant]) -> None:
        """Other tenants and limits hold for requests that come from now on."""
        if self._tenants is not None:
            self._tenants.change(tenants, self._clock())

    def budgets(self, tenant: Tenant) -> list[Budget]:
        """The tenant's budgets of tokens, with what is used of them."""
        return list(budgets_of(tenant, self._metrics.usage))

    def check_budgets(self, requests: Sequence[GenerationRequest]) -> None:
        """Check the tenant's budgets for all prompts of one client's request. Raises BudgetSpent.

        To be called right before the first of them is submitted.
        """
        if requests:
            self.check_budget(requests[0].tenant, sum(len(each.prompt_token_ids) for each in requests))

    def check_budget(self, tenant: str, prompt_tokens: int) -> None:
        """Check a tenant's budgets, by its name, for the tokens of all prompts of a request. Raises BudgetSpent."""
        if self._tenants is None:
            return
        try:
            self._tenants.check_budget(tenant, prompt_tokens, self._metrics.usage)
        except BudgetSpent:
            self._metrics.reject("tenant")
            raise

    async def place(
        self, requests: Sequence[GenerationRequest], stream: RequestStream
    ) -> AsyncIterator[GenerationRequest]:
        """Submit all prompts of one client's request in one turn; yields each when it has its place.

        The places of a list are all taken before those of another. Raises as `submit` does.
        """
        for request in requests:
            self.submit(request, stream)
            yield request

    def occupancy(self) -> tuple[int, int, int, float]:
        """Places that are taken, all places, seats, and sequences that end per second."""
        taken = self._sequences - self._num_held
        return taken, self._limits.max_sequences, self._num_seats, self._seats.rate(self._clock())

    def submit(self, request: GenerationRequest, stream: RequestStream, *, is_check: bool = False) -> None:
        """Reserve a place in the queue and pass the request to the engine; its outputs go to `stream`.

        A health check (`is_check`) needs no place. Raises QueueFull, DeadlineExceeded, RequestQuarantined, NotReady.
        """
        if self._closed:
            raise ShuttingDown
        now = self._clock()
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded
        refused_for = self._quarantine.refusal(request, now)
        if refused_for is not None:
            self._metrics.reject("quarantine")
            raise RequestQuarantined(refused_for)
        exceeded = None if is_check else self._exceeded_limit(request)
        if exceeded is not None:
            raise self._refusal(exceeded, request.num_sequences)
        if not is_check:
            self._check_gates(request, now)
        self._accept(request, stream, now)

    def _accept(self, request: GenerationRequest, stream: RequestStream, now: float) -> None:
        self._watch(request)
        stream.expect(request)
        self._streams[request.request_id] = stream
        self._sequences += request.num_sequences
        self._prompt_tokens += len(request.prompt_token_ids)
        self._unanswered[request.request_id] = len(request.prompt_token_ids)
        self._metrics.occupied(now, self._sequences)
        self._seats.observe(now, sequences=self._sequences - self._num_held)
        self._idle.clear()
        self._port.submit(request)

    def hold(self, requests: Iterable[GenerationRequest]) -> None:
        """Backpressure: their outputs are not read, so hold them in the engine and free their places in the queue."""
        for request in requests:
            self._held[request.request_id] = request.num_sequences
            self._num_held += request.num_sequences
            self._port.hold_request(request.request_id)

    def release_held(self, requests: Iterable[GenerationRequest]) -> None:
        """Release requests whose outputs were read, even if other requests have taken their places in the queue."""
        for request in requests:
            self._num_held -= self._held.pop(request.request_id)
            self._port.release_request(request.request_id)

    def refusal(self, lately: int = 0, underway: int = 0) -> QueueFull | None:
        """The refusal of any request that came now; None if it depends on the request. Counts as refused.

        While all seats are taken, `underway` requests count as queued already, except for a few. Otherwise only the
        requests that came `lately` count.
        """
        if self._closed or not self.is_full(lately, underway):
            return None
        return self._refusal("max_num_queued_reqs", 1)

    def is_full(self, lately: int = 0, underway: int = 0) -> bool:
        """Whether `refusal` would refuse; counts nothing."""
        taken = self._sequences - self._num_held
        return is_full(taken, self._num_seats, self._limits.max_sequences, lately, underway)

    def _watch(self, request: GenerationRequest) -> None:
        """End the request at its deadline, also while no engine runs."""
        if request.deadline is not None:
            left, loop = request.deadline - self._clock(), asyncio.get_running_loop()
            self._deadlines[request.request_id] = loop.call_later(left, self._expire, request.request_id)

    def _expire(self, request_id: str) -> None:
        self._streams[request_id].expire(request_id)

    def on_step(self, step: StepOutput) -> None:
        """Pass one step's outputs to their streams."""
        num_tokens = num_prompt_tokens = 0
        for output in step.outputs:
            num_tokens += len(output.token_ids)
            if output.timing is not None:  # the first of a choice, or its last
                num_prompt_tokens += self._unanswered.pop(output.request_id, 0)
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.deliver(output)
        if self._tenants is not None:
            self._tenants.observe(step.stats.tenants, self._clock())
        if self._ttft is not None:
            for output in step.outputs:
                if output.timing is not None:
                    self._ttft.answered(output.request_id)
            self._ttft.observe(step.stats, self._clock())
        # Last, so that an error in the metrics loses no tokens.
        self._metrics.observe_step(step.stats, num_tokens, num_prompt_tokens)

    def release(self, request: GenerationRequest, *, finished: bool) -> None:
        """Free the request's place, once; abort it in the engine unless it has finished."""
        if self._streams.pop(request.request_id, None) is None:
            return
        self._unanswered.pop(request.request_id, None)
        if request.deadline is not None:
            self._deadlines.pop(request.request_id).cancel()
        if self._tenants is not None:
            self._tenants.release(request, self._clock())
        if self._ttft is not None:
            self._ttft.answered(request.request_id)
        self._sequences -= request.num_sequences
        self._prompt_tokens -= len(request.prompt_token_ids)
        held = self._held.pop(request.request_id, 0)
        self._num_held -= held
        self._metrics.occupied(now := self._clock(), self._sequences)
        self._seats.observe(now, sequences=self._sequences - self._num_held, ended=0 if held else request.num_sequences)
        if not finished:
            self._port.abort(request.request_id)
        if not self._streams:
            self._idle.set()

    def _check_gates(self, request: GenerationRequest, now: float) -> None:
        """Check the tenant's limits, then the TTFT target; a refusal by either uses up nothing."""
        if self._tenants is not None:
            try:
                self._tenants.check(request, now)
            except QueueFull:
                self._metrics.reject("tenant")
                raise
        if self._ttft is not None:
            wait = self._ttft.refusal(request, now)
            if wait is not None:
                self._metrics.reject("slo_ttft")
                raise QueueFull("the first token would come too late", retry_after_seconds=wait, code="slo_ttft")
            self._ttft.accept(request, now)
        if self._tenants is not None:
            self._tenants.take(request, now)

    def _exceeded_limit(self, request: GenerationRequest) -> str | None:
        """The name of the setting that the request would exceed, or None."""
        if self._sequences - self._num_held + request.num_sequences > self._limits.max_sequences:
            return "max_num_queued_reqs"
        limit, tokens = self._limits.max_prompt_tokens, self._prompt_tokens + len(request.prompt_token_ids)
        return "max_num_queued_tokens" if limit is not None and self._streams and tokens > limit else None

    def _refusal(self, reason: str, sequences: int) -> QueueFull:
        self._metrics.reject(reason)
        now = self._clock()
        waiting = max(self._sequences - self._num_held - self._num_seats, 0)
        wait = self._retry_line.wait(now, sequences=sequences, waiting=waiting, rate=self._seats.rate(now))
        wait = min(wait + self.seconds_until_engine(), LONGEST_SECONDS)
        return QueueFull("the server is at capacity: its queue is full", retry_after_seconds=wait)

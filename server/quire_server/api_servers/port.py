"""The main process as an API server sees it: the queue and the engine behind one link.

Promises: whether a request has a place is the main process's word, before anything of it is counted; while the queue of
all is full most requests are refused here, without asking.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from quire_engine.contract.errors import EngineDead, ProtocolError
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import EngineHealth, EngineStats, GenerationRequest, StepOutput
from quire_engine.process.transport import Abort, Hold, LoadProgress, Release
from quire_server.api_servers.forwarding import Forwarder
from quire_server.api_servers.frames import (
    MainState,
    Named,
    Order,
    Outputs,
    Place,
    Placed,
    Sent,
    Wanted,
)
from quire_server.engine.admission import QueueLimits, RetryLine
from quire_server.engine.engine_client import EngineClient, RequestStream, is_full
from quire_server.engine.recovery import Quarantine
from quire_server.engine.request_names import RequestNames
from quire_server.errors import ApiError, QueueFull, ShuttingDown, error_from
from quire_server.metrics.metrics import Metrics
from quire_server.metrics.request_record import CURRENT

_NO_STATS = EngineStats()  # the main process counts what the engine does


class MainProcess:
    """An `engines.Engines` whose queue, engine and supervisor are in the main process."""

    def __init__(self, send: Callable[[Any], None], count: int) -> None:
        """`send`: sends a frame; `count`: of all API servers."""
        loop = asyncio.get_running_loop()
        self.on_step: Callable[[StepOutput], None] = lambda _: None
        self.on_restart: Callable[[], None] = lambda: None
        self.on_state: Callable[[MainState], None] = lambda _: None
        self.on_order: Callable[[Order], None] = lambda _: None
        self.quarantine = Quarantine()  # the main process refuses for it
        self.dead: asyncio.Future[None] = loop.create_future()
        self.state: MainState | None = None
        self.occupied = Outputs()
        self.count = count
        self.forwarder = Forwarder(send)
        self.send = send
        self._ready: asyncio.Future[EnginePlan] = loop.create_future()
        self._places: dict[str, asyncio.Future[None]] = {}
        self._lists: dict[str, int] = {}

    def receive(self, frame: Any) -> None:
        """Take in a frame. Raises ProtocolError for what no main process sends."""
        match frame:
            case Outputs():
                self.occupied = frame
                if frame.outputs:
                    self.on_step(StepOutput(step_id=0, outputs=frame.outputs, stats=_NO_STATS))
            case Placed():
                self._answer(frame)
            case Wanted() | Sent():
                self.forwarder.receive(frame)
            case MainState():
                self.state = frame
                if frame.plan is not None and not self._ready.done():
                    self._ready.set_result(frame.plan)
                self.on_state(frame)
            case Order():
                self.on_order(frame)
            case _:
                raise ProtocolError(f"a {type(frame).__name__} frame, which no main process sends")

    # ---------------------------------------------------------------- requests

    def expect_list(self, request_id: str, tokens: int) -> None:
        """The request with this id is the first of a client's, whose prompts have so many tokens together."""
        self._lists[request_id] = tokens

    def submit(self, request: GenerationRequest) -> None:
        """Ask for a place; `placed` has the answer."""
        story = CURRENT.get()
        account = "" if story is None else story.account
        self._places[request.request_id] = asyncio.get_running_loop().create_future()
        self.send(Place(request=request, account=account, list_tokens=self._lists.pop(request.request_id, None)))

    def placed(self, request_id: str) -> asyncio.Future[None]:
        """Done when the request has its place; the refusal is its exception."""
        return self._places[request_id]

    def _answer(self, frame: Placed) -> None:
        placed = self._places.pop(frame.request_id, None)
        if placed is None or placed.done():  # its client has gone meanwhile
            return
        if frame.refusal is None:
            placed.set_result(None)
        else:
            placed.set_exception(error_from(frame.refusal))

    def abort(self, request_id: str) -> None:
        self.send(Abort(request_id=request_id))

    def hold_request(self, request_id: str) -> None:
        self.send(Hold(request_id=request_id))

    def release_request(self, request_id: str) -> None:
        self.send(Release(request_id=request_id))

    # ---------------------------------------------------------------- the engine, which is elsewhere

    async def start(self) -> EnginePlan:
        """The plan of the main process's engine, once it is ready."""
        return await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """The main process stops the engine."""

    @property
    def num_replicas(self) -> int:
        return 1

    def whole_plan(self, plan: EnginePlan) -> EnginePlan:
        return plan

    @property
    def progress(self) -> LoadProgress | None:
        return None

    def load_ratio(self) -> float:
        return 1.0

    def trouble(self) -> str | None:
        return None

    def overdue_seconds(self) -> float:
        return -math.inf

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, step_id=0, has_work=False)

    async def inspect(self, what: str, argument: str = "{}") -> bytes:  # noqa: ARG002 - questions go to the main process
        raise EngineDead("the main process is asked")

    async def control(self, what: str, argument: str = "{}") -> bytes:  # noqa: ARG002 - and so do orders
        raise EngineDead("the main process gives orders")


class SharedClient(EngineClient):
    """The engine client of an API server: streams of its own, in a queue that all share."""

    def __init__(self, main: MainProcess, plan: EnginePlan, metrics: Metrics) -> None:
        super().__init__(main, plan=plan, limits=QueueLimits(max_sequences=1 << 62), metrics=metrics)
        self._main = main
        self._line = RetryLine()

    def on_step(self, step: StepOutput) -> None:
        for output in step.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.deliver(output)

    @property
    def max_sequences(self) -> int:
        return self._main.occupied.most or super().max_sequences

    def check_budget(self, tenant: str, prompt_tokens: int) -> None:
        """The main process checks it when it is asked for a place."""

    async def place(
        self, requests: Sequence[GenerationRequest], stream: RequestStream
    ) -> AsyncIterator[GenerationRequest]:
        if self._closed:
            raise ShuttingDown
        self._main.expect_list(requests[0].request_id, sum(len(each.prompt_token_ids) for each in requests))
        for request in requests:
            self._accept(request, stream, self._clock())
        answers = [self._main.placed(request.request_id) for request in requests]
        try:
            for request, answer in zip(requests, answers, strict=True):
                try:
                    await answer
                except ApiError:
                    stream.dismiss(request.request_id)
                    raise
                yield request
        finally:
            for answer in answers:
                if not answer.cancel() and not answer.cancelled():
                    answer.exception()  # of a further refusal, so that asyncio does not warn of it

    def is_full(self, lately: int = 0, underway: int = 0) -> bool:
        main = self._main.occupied
        if self._closed or not main.most:
            return False
        return is_full(main.taken, main.seats, main.most, lately, underway)

    def refusal(self, lately: int = 0, underway: int = 0) -> QueueFull | None:
        if not self.is_full(lately, underway):
            return None
        main = self._main.occupied
        self._metrics.reject("max_num_queued_reqs")
        # The line of refused clients is in as many parts as there are API servers.
        rate = max(main.rate / self._main.count, 1e-3)
        waiting = max(main.taken - main.seats, 0) // self._main.count
        wait = self._line.wait(self._clock(), sequences=1, waiting=waiting, rate=rate)
        return QueueFull("the server is at capacity: its queue is full", retry_after_seconds=wait)


class TellingNames(RequestNames):
    """Names of requests, passed on to the main process, since operators ask there."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        super().__init__()
        self._send = send

    def add(self, names: Any, request_ids: Any) -> None:
        names, ids = tuple(filter(None, names)), tuple(request_ids)
        self._send(Named(names=names, request_ids=ids))

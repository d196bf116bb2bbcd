"""A node as an engine of this front: a connection that is made again and again, and the journal of what it has.

Promises: requests of a lost node are handed back at once, with the tokens that were delivered; later words of that node
reach no stream, since its connection is gone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from quire_engine.contract.errors import ConfigError, EngineDead, ProtocolError, Unanswerable
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import EngineHealth, EngineStats, GenerationRequest, StepOutput
from quire_engine.links.handshake import Refused
from quire_engine.links.link_security import LinkSecurity
from quire_engine.own_pauses import OwnPauses
from quire_engine.process.transport import Abort, Control, Hold, Inspect, Inspected, LoadProgress, Release
from quire_server.background import begin
from quire_server.engine.connection import MOST_QUESTIONS, TooManyQuestions
from quire_server.engine.nodes.addresses import Address
from quire_server.engine.nodes.connecting import connect, why_unconnected
from quire_server.engine.nodes.frames import (
    NodeState,
    NodeStep,
    Ping,
    request_shifted,
    stats_shifted,
)
from quire_server.engine.nodes.link import Link
from quire_server.engine.recovery import JournalEntry, Loss, Quarantine, Recovery
from quire_server.engine.supervisor import ANSWER_SECONDS, EngineState

CONNECT_SECONDS = 5.0
PING_SECONDS = 0.5
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 2.0  # seconds between two attempts, doubled with each
_LOOK_SECONDS = 0.25
_ANY_HOST = ("0.0.0.0", "[::]")

log = logging.getLogger("quire.nodes")


class RemoteEngine:
    """One node; a `replicas.ReplicaEngine`. Its methods do what those of `Supervisor` do."""

    def __init__(
        self,
        address: Address,
        security: LinkSecurity,
        *,
        check: Callable[[NodeState], str],
        quarantine: Quarantine,
        silence_seconds: float,
    ) -> None:
        """`check`: why a node that is ready cannot serve here; empty: it can. `silence_seconds`: without a sign of
        life, after which the node is given up.
        """
        self.on_step: Callable[[StepOutput], None] = lambda _: None
        self.on_restart: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self.on_drain: Callable[[], None] = lambda: None  # the node takes nothing new any more
        self.on_new_engine: Callable[[], None] = lambda: None  # another engine than before; comes before `on_ready`
        self.address = address
        self.state = EngineState.STARTING
        self.plan: EnginePlan | None = None  # of the node's engine; None: it has not been ready yet
        self.why = "not connected yet"  # why it does not serve; empty: it does
        self.elsewhere = (0, 0)  # prompt tokens ahead and requests of other fronts
        self._security, self._check, self._silence = security, check, silence_seconds
        self._quarantine = quarantine
        self._recovery = Recovery()
        self._link: Link | None = None
        self._told: NodeState | None = None  # its latest state; None: there is no connection
        self._engine = ""  # names the engine that it had when it was last ready
        self._restarts = self._attempts = 0
        self._step_id = 0
        self._asked: dict[int, asyncio.Future[Inspected]] = {}
        self._tokens, self._pings = count(), count(1)
        self._sent: dict[int, float] = {}  # pings that have not come back
        self._answered = time.monotonic()  # when the last ping that has come back was sent
        self._task: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- life

    def begin(self) -> None:
        """Connect, and do so again whenever the connection is lost."""
        self._task = begin(self._run, f"node {self.address}")

    async def stop(self) -> None:
        """End the connection; unfinished requests end with an error. Idempotent."""
        self.state = EngineState.STOPPED
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._drop("the server is shutting down")
        for entry in self._recovery.dismiss():
            self._fail(entry, "the server is shutting down")

    @property
    def pid(self) -> int | None:
        """Process id of the node's engine, on its machine."""
        return None if self._told is None else self._told.pid

    @property
    def restarts(self) -> int:
        """How often engines of the node were replaced, as far as this front has seen."""
        return self._restarts

    @property
    def is_proving(self) -> bool:
        return self._told is not None and self._told.proving

    @property
    def is_draining(self) -> bool:
        """Whether the node itself takes nothing new."""
        return self._told is not None and self._told.draining

    @property
    def is_coming(self) -> bool:
        """Whether it has not served yet, and may do so in a moment."""
        return self.state is EngineState.STARTING and (self._told is not None or not self._attempts)

    @property
    def progress(self) -> LoadProgress | None:
        return None if self._told is None else self._told.progress

    def load_ratio(self) -> float:
        if self.state is EngineState.READY:
            return 1.0
        return 0.0 if self.progress is None else self.progress.ratio

    def trouble(self) -> str | None:
        return None if self.state is EngineState.READY else "no node serves"

    def overdue_seconds(self) -> float:
        return -math.inf  # a node watches its engine itself

    def health(self) -> EngineHealth:
        return EngineHealth(
            alive=self.state is EngineState.READY, step_id=self._step_id, has_work=len(self._recovery) > 0
        )

    async def _run(self) -> None:
        backoff = 0.0
        while True:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    link = await connect(self.address, self._security)
            except (Refused, ConfigError, OSError) as error:
                self._trouble(why_unconnected(error, CONNECT_SECONDS))
            else:
                since = time.monotonic()
                try:
                    await self._follow(link)
                finally:
                    self._lose(link)
                if time.monotonic() > since + _LONGEST_BACKOFF:
                    backoff = 0.0
            self._attempts += 1
            backoff = min(max(2 * backoff, _FIRST_BACKOFF), _LONGEST_BACKOFF)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # fronts must not come all at once

    def _trouble(self, why: str) -> None:
        if why != self.why:
            log.warning("the node at %s cannot be used: %s", self.address, why)
        self.why = why

    async def _follow(self, link: Link) -> None:
        """Ping a node until its connection is lost, or no sign of life has come for too long."""
        self._link, self._sent = link, {}
        self._answered = time.monotonic()
        link.begin(self._receive)
        pinged, pauses = -math.inf, OwnPauses(_LOOK_SECONDS)
        while not link.lost.done():
            now = time.monotonic()
            if now >= pinged + PING_SECONDS:
                pinged, number = now, next(self._pings)
                self._sent[number] = now
                link.send(Ping(number=number))
            await asyncio.wait([link.lost], timeout=min(_LOOK_SECONDS, self._silence / 4))
            silence = pauses.silence(self._answered)
            if not link.lost.done() and silence >= self._silence:
                link.was_silent = True
                link.abort(f"no sign of life for {silence:.1f} s")

    def _drop(self, why: str) -> None:
        link, self._link, self._told = self._link, None, None
        self.elsewhere = (0, 0)
        if link is not None:
            link.abort(why)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(EngineDead(f"the node at {self.address} was lost while it was asked"))

    def _lose(self, link: Link) -> None:
        """The connection is gone: others go on with what the node had.

        A connection that ends by itself may be the end of a process, for which a request may be to blame; silence is a
        matter of wires and machines.
        """
        is_expected = self.is_draining
        self._drop(link.why_lost)
        self._trouble(link.why_lost)
        if self.state in (EngineState.STOPPED, EngineState.STARTING):
            return
        self.state = EngineState.LOST
        if is_expected and not len(self._recovery):
            log.info("the node at %s has drained and is gone", self.address)
        if link.was_silent or is_expected:
            self._recovery.out_of_reach()
        for entry in self._recovery.crashed(Loss.DOUBTFUL, now=time.monotonic()):
            self._fail(entry, "nodes were lost with this request; it will not be tried again")
        self.on_lost()

    # ---------------------------------------------------------------- from the node

    def _receive(self, frame: Any) -> None:
        match frame:
            case NodeStep():
                self._deliver(frame)
            case Ping():
                self._answered = max(self._answered, self._sent.pop(frame.number, 0.0))
            case NodeState():
                self._take(frame)
            case Inspected():
                asked = self._asked.get(frame.token)
                if asked is not None and not asked.done():  # otherwise the caller has stopped waiting
                    asked.set_result(frame)
            case _:
                raise ProtocolError(f"a {type(frame).__name__} frame, which no node sends")

    def _take(self, told: NodeState) -> None:
        """The node's state has changed, or this is its greeting."""
        if self.state is EngineState.STOPPED:
            return
        was, self._told = self._told, told
        why = self._check(told)
        engine = f"{told.instance} {told.restarts}"
        if told.state == EngineState.READY.value and not why and told.plan is not None:
            is_new = self.state is not EngineState.READY
            self.plan, self.why = self._as_reached(told.plan), ""
            if is_new:
                if engine != self._engine:
                    self._count_restarts(told)
                    self.on_new_engine()
                self._engine, self.state = engine, EngineState.READY
                log.info("the node at %s is ready", self.address)
                self.on_ready()
        else:
            self._trouble(why or f"its engine is {told.state}")
            if self.state is EngineState.READY:
                self.state = EngineState.RESTARTING
                self.on_lost()
        if told.draining and (was is None or not was.draining):
            self.on_drain()

    def _as_reached(self, plan: EnginePlan) -> EnginePlan:
        """The plan, in which a node that lends KV blocks at all of its addresses does so at the one that is known."""
        host, _, port = plan.transfer.address.rpartition(":")
        if host not in _ANY_HOST:
            return plan
        return replace(plan, transfer=replace(plan.transfer, address=str(Address(self.address.host, int(port)))))

    def _count_restarts(self, told: NodeState) -> None:
        instance, _, restarts = self._engine.partition(" ")
        if not instance:
            return
        more = told.restarts - int(restarts) if instance == told.instance else 1
        self._restarts += more
        for _ in range(more):
            self.on_restart()

    def _deliver(self, told: NodeStep) -> None:
        now = time.monotonic()
        for output in told.step.outputs:
            guilty = self._recovery.request(output.request_id) if output.culprit else None
            if guilty is not None:  # proven by the node, which refuses its like too
                log.error("a request has taken the engine of the node at %s down", self.address)
                self._quarantine.add(guilty, now)
        step = self._recovery.record(told.step)
        self._recovery.culprits.clear()
        self.elsewhere = (told.tokens_ahead, told.requests)
        self._step_id = step.step_id or self._step_id
        try:
            self.on_step(replace(step, stats=stats_shifted(step.stats, now)))
        except Exception:
            log.exception("what step %d computed could not be delivered in full", step.step_id)

    # ---------------------------------------------------------------- requests

    def adopt(self, entry: JournalEntry) -> None:
        """Take over a request with the tokens that others have delivered."""
        if self._link is None:
            if self.state is EngineState.STOPPED:
                self._fail(entry, "the engine is not running")
            else:
                self._recovery.enqueue(entry)
        elif entry.held:
            self._recovery.enqueue(entry)
        else:
            self._recovery.admit(entry)
            self._submit(entry.resumed_request())

    def _submit(self, request: GenerationRequest) -> None:
        if self._link is not None:
            self._link.send(request_shifted(request, -time.monotonic()))

    def has(self, request_id: str) -> bool:
        return request_id in self._recovery

    def take(self, request_id: str) -> JournalEntry | None:
        entry = self._recovery.hand_over(request_id)
        if entry is not None:
            self._tell(Abort(request_id=request_id), is_due=entry.leave_engine())
        return entry

    def surrender(self, *, suspects: bool) -> list[JournalEntry]:
        """Give up what the node has, for others.

        While it is connected it keeps its requests: it finds culprits and replays the others itself; `suspects`: it had
        time enough for that.
        """
        if self._link is None:
            return self._recovery.surrender(suspects=True)
        if not suspects:
            return []
        entries = self._recovery.dismiss()
        for entry in entries:
            self._tell(Abort(request_id=entry.request.request_id), is_due=entry.leave_engine())
        return entries

    def abort(self, request_id: str) -> None:
        self._tell(Abort(request_id=request_id), is_due=self._recovery.forget(request_id))

    def hold_request(self, request_id: str) -> None:
        self._tell(Hold(request_id=request_id), is_due=self._recovery.hold(request_id))

    def release_request(self, request_id: str) -> None:
        self._tell(Release(request_id=request_id), is_due=self._recovery.release(request_id))
        while self._link is not None and (request := self._recovery.next_request()) is not None:
            self._submit(request)

    def _tell(self, frame: Abort | Hold | Release, *, is_due: bool) -> None:
        if is_due and self._link is not None:
            self._link.send(frame)

    def _fail(self, entry: JournalEntry, message: str) -> None:
        outputs = entry.failure(message, culprit=False)
        self.on_step(StepOutput(step_id=0, outputs=outputs, stats=EngineStats()))

    # ---------------------------------------------------------------- questions

    async def inspect(self, what: str, argument: str = "{}") -> bytes:
        return await self._ask(Inspect, what, argument)

    async def control(self, what: str, argument: str = "{}") -> bytes:
        return await self._ask(Control, what, argument)

    async def _ask(self, kind: type[Inspect | Control], what: str, argument: str) -> bytes:
        if self._link is None:
            raise EngineDead(f"the node at {self.address} is not there to be asked")
        if len(self._asked) >= MOST_QUESTIONS:
            raise TooManyQuestions(f"{MOST_QUESTIONS} questions are not answered yet")
        token = next(self._tokens)
        asked: asyncio.Future[Inspected] = asyncio.get_running_loop().create_future()
        self._asked[token] = asked
        self._link.send(kind(token=token, what=what, argument=argument))
        try:
            async with asyncio.timeout(ANSWER_SECONDS + 1.0):  # the node answers, if only that its engine does not
                answer = await asked
        except TimeoutError:
            raise EngineDead(f"the node at {self.address} has not answered for {ANSWER_SECONDS + 1:g} s") from None
        finally:
            del self._asked[token]
        if answer.error:
            raise Unanswerable(answer.error)
        return answer.body

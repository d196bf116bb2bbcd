"""One front at a node: its requests and its questions, outputs and load for it.

Promises: a front learns of its own requests only, and its orders about requests of other fronts are passed over. A
front that ends, hangs or sends nonsense ends its own requests and no others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from quire_engine.contract.errors import ProtocolError, QuireError
from quire_engine.contract.types import EngineStats, GenerationRequest, PrefixChanges, StepOutput, TokenOutput
from quire_engine.process.transport import Abort, Control, Hold, Inspect, Inspected, Release
from quire_server.engine.connection import MOST_QUESTIONS
from quire_server.engine.nodes.checks import check_shape
from quire_server.engine.nodes.frames import NodeState, NodeStep, Ping, request_shifted, stats_shifted
from quire_server.engine.nodes.link import Link
from quire_server.engine.recovery import JournalEntry, Quarantine

STATS_SECONDS = 0.1  # between two statistics of steps that a front has no part in
_TOO_LONG = "the answer is too long to be sent from the node"
_TAKEN = "the request's id is in use at the node"
_REFUSED = "its like has taken an engine down; it will not be tried again for a while"

log = logging.getLogger("quire.nodes")


class NodeEngine(Protocol):
    """The engine of a node: `supervisor.Supervisor`."""

    quarantine: Quarantine

    def adopt(self, entry: JournalEntry) -> None: ...
    def has(self, request_id: str) -> bool: ...
    def abort(self, request_id: str) -> None: ...
    def hold_request(self, request_id: str) -> None: ...
    def release_request(self, request_id: str) -> None: ...
    async def inspect(self, what: str, argument: str = "{}") -> bytes: ...
    async def control(self, what: str, argument: str = "{}") -> bytes: ...


class PrefixLedger:
    """The prompt blocks that the engine has cached, for fronts that come later."""

    def __init__(self, most: int) -> None:
        """`most`: blocks, of which the latest are kept."""
        self._most = most
        self._depths: dict[int, int] = {}

    def apply(self, changes: PrefixChanges) -> None:
        """Take in what the engine tells."""
        for block in changes.forgotten:
            self._depths.pop(block, None)
        self._depths.update(zip(changes.registered, changes.depths, strict=True))
        while len(self._depths) > self._most:
            del self._depths[next(iter(self._depths))]

    def snapshot(self) -> PrefixChanges | None:
        """All of them as one change; None: there are none."""
        if not self._depths:
            return None
        return PrefixChanges(number=0, registered=tuple(self._depths), depths=tuple(self._depths.values()))


class Session:
    """One connected front."""

    def __init__(
        self,
        name: str,
        link: Link,
        engine: NodeEngine,
        owners: dict[str, Session],
        *,
        clock: Callable[[], float] = time.monotonic,
        wrong_in: Callable[[GenerationRequest], str] = lambda _: "",
    ) -> None:
        """`name`: for the log; `owners`: of all live requests by id, shared by all sessions.

        `wrong_in`: the reason why the engine cannot have a request, else empty.
        """
        self.name = name
        self.link = link
        self.unanswered: dict[str, int] = {}  # prompt tokens of live requests without an output
        self.live: set[str] = set()
        self.told_at = 0.0  # when it last got statistics
        self._engine, self._owners, self._clock, self._wrong_in = engine, owners, clock, wrong_in
        self._questions: set[asyncio.Task[None]] = set()
        self._number = 0  # of the last change of prefixes that was sent
        self._stats = EngineStats()

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens of its requests without an output."""
        return sum(self.unanswered.values())

    # ---------------------------------------------------------------- from the front

    def receive(self, frame: Any) -> None:
        """Do what a frame asks for. Raises ProtocolError for what no front sends."""
        match frame:
            case GenerationRequest():
                self._submit(request_shifted(frame, self._clock()))
            case Abort() if frame.request_id in self.live:
                self._forget(frame.request_id)
                self._engine.abort(frame.request_id)
            case Hold() if frame.request_id in self.live:
                self._engine.hold_request(frame.request_id)
            case Release() if frame.request_id in self.live:
                self._engine.release_request(frame.request_id)
            case Abort() | Hold() | Release():
                pass  # it has ended meanwhile
            case Inspect():
                self._ask(self._engine.inspect, frame)
            case Control():
                self._ask(self._engine.control, frame)
            case Ping():
                self.link.send(frame)
            case _:
                raise ProtocolError(f"a {type(frame).__name__} frame, which no front sends")

    def _submit(self, request: GenerationRequest) -> None:
        check_shape(request)
        entry = entry_of(request)
        wrong = self._wrong_in(request)
        if wrong:
            self._tell(entry.failure(f"the node cannot compute it: it has {wrong}", culprit=True))
            return
        if request.request_id in self._owners or self._engine.has(request.request_id):
            self._tell(entry.failure(_TAKEN, culprit=False))
            return
        if self._engine.quarantine.refusal(request, time.monotonic()) is not None:
            self._tell(entry.failure(_REFUSED, culprit=True))
            return
        self._owners[request.request_id] = self
        self.live.add(request.request_id)
        self.unanswered[request.request_id] = len(request.prompt_token_ids) + max(map(len, entry.tokens), default=0)
        self._engine.adopt(entry)

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id, None)
        self.live.discard(request_id)
        self.unanswered.pop(request_id, None)

    def _ask(self, engine: Callable[[str, str], Any], asked: Inspect | Control) -> None:
        if len(self._questions) >= MOST_QUESTIONS:
            error = f"{MOST_QUESTIONS} questions are not answered yet"
            self.link.send(Inspected(token=asked.token, error=error))
            return
        task = asyncio.create_task(self._answer(engine, asked))
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _answer(self, engine: Callable[[str, str], Any], asked: Inspect | Control) -> None:
        try:
            answer = Inspected(token=asked.token, body=await engine(asked.what, asked.argument))
        except QuireError as error:
            answer = Inspected(token=asked.token, error=str(error))
        self.link.send(answer)

    # ---------------------------------------------------------------- to the front

    def greet(self, state: NodeState, stats: EngineStats, held: PrefixChanges | None) -> None:
        """The first frames: the node's state, its load, and the prompts that it has cached."""
        self.link.send(state)
        self.tell(stats=stats, prefixes=held)

    def tell(
        self,
        *,
        outputs: Sequence[TokenOutput] = (),
        step_id: int = 0,
        stats: EngineStats,
        prefixes: PrefixChanges | None = None,
        others: tuple[int, int] = (0, 0),
    ) -> None:
        """A step's outputs of this front's requests, and the node's load.

        `others`: prompt tokens ahead and requests of other fronts. An output that is too long ends its request.
        """
        for output in outputs:
            if output.progress is None:
                self.unanswered.pop(output.request_id, None)
            if output.finish is not None and not self._engine.has(output.request_id):
                self._forget(output.request_id)
        now = self._clock()
        self.told_at, self._stats = now, stats_shifted(stats, -now)
        if prefixes is not None:
            self._number += 1
            prefixes = replace(prefixes, number=self._number)
        step = StepOutput(step_id=step_id, outputs=tuple(outputs), stats=self._stats, prefixes=prefixes)
        tokens, requests = others
        try:
            self.link.send(NodeStep(step=step, tokens_ahead=tokens, requests=requests))
        except ProtocolError:
            self._tell_apart(step)

    def forget_prefixes(self) -> None:
        """The engine is a new one, with nothing cached; the front learns that from the node's state."""
        self._number = 0

    def _tell(self, outputs: Sequence[TokenOutput]) -> None:
        self.link.send(NodeStep(step=StepOutput(step_id=0, outputs=tuple(outputs), stats=self._stats)))

    def _tell_apart(self, step: StepOutput) -> None:
        """One frame for each output; what does not fit into one ends its request."""
        self.link.send(NodeStep(step=replace(step, outputs=())))
        for output in step.outputs:
            try:
                self._tell([output])
            except ProtocolError:
                if output.request_id in self.live:
                    self._forget(output.request_id)
                    self._engine.abort(output.request_id)
                self._tell([replace(_bare(output), finish="error", error=_TOO_LONG)])

    def close(self) -> None:
        """The front is gone: its requests end."""
        for task in self._questions:
            task.cancel()
        for request_id in list(self.live):
            self._forget(request_id)
            self._engine.abort(request_id)


def entry_of(request: GenerationRequest) -> JournalEntry:
    """The journal's entry of a request that comes with tokens that another engine has computed."""
    entry = JournalEntry(request)
    if request.resumed_token_ids:
        entry.tokens = [list(tokens) for tokens in request.resumed_token_ids]
    entry.finished = set(request.finished_choices)
    return entry


def ahead_of(sessions: Mapping[Session, object] | Sequence[Session], own: Session) -> tuple[int, int]:
    """Prompt tokens and requests of the others."""
    others = [each for each in sessions if each is not own]
    return sum(each.tokens_ahead for each in others), sum(len(each.live) for each in others)


def _bare(output: TokenOutput) -> TokenOutput:
    return TokenOutput(request_id=output.request_id, choice=output.choice)

"""Which live request goes to the engine next, and which one is guilty when the engine goes down.

Owns the journal of live requests, their strikes, and the queue of those the engine does not have. Promises: a request
that takes the engine down twice is singled out. Must not know: processes, sockets, the event loop, time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from quire_engine.types import GenerationRequest, StepOutput
from quire_server.engine.journal import JournalEntry

STRIKES = 2  # crashes in a row, without a token in between, that prove a request guilty
STRIKES_IN_DOUBT = 3  # where the crash has another explanation: blame more slowly


class Recovery:
    """The live requests in order of arrival, and what each crash says about them.

    After a crash the requests that the engine held are suspects. They are sent again one at a time: a suspect is on
    probation, with no other suspect in the engine, until it has made progress. So a second crash has one culprit, and
    the suspects that only shared a batch with it are never blamed.
    """

    def __init__(self) -> None:
        self.waiting: deque[str] = deque()  # not in the engine, in the order in which they go there
        self._journal: dict[str, JournalEntry] = {}
        self._probation: str | None = None  # the suspect in the engine that has not produced anything yet
        self._suspect_left = False  # the engine may still be computing a suspect that was aborted on probation

    def __len__(self) -> int:
        """Live requests."""
        return len(self._journal)

    def admit(self, request: GenerationRequest) -> None:
        """Take in a request that is sent to the engine at once."""
        self._journal[request.request_id] = entry = JournalEntry(request)
        entry.in_flight = True

    def enqueue(self, request: GenerationRequest) -> None:
        """Take in a request while there is no engine to send it to."""
        self._journal[request.request_id] = JournalEntry(request)
        self.waiting.append(request.request_id)

    def next_request(self) -> GenerationRequest | None:
        """What the engine is to be sent now. None: nothing waits, or what waits must wait longer."""
        while self.waiting and self._probation is None:
            request_id = self.waiting.popleft()
            entry = self._journal.get(request_id)
            if entry is None:
                continue  # aborted while it waited
            if entry.strikes > 0:
                self._probation = request_id
            entry.in_flight = True
            return entry.resumed_request()
        return None

    def record(self, step: StepOutput) -> StepOutput:
        """Note what is about to be delivered. Returns the step without outputs of requests that are not live."""
        live = []
        for output in step.outputs:
            entry = self._journal.get(output.request_id)
            if entry is None:
                continue  # aborted while the output was on its way
            live.append(output)
            entry.strikes = 0
            if output.request_id == self._probation:
                self._probation = None
                self._suspect_left = False  # the engine reads in order: it has seen the abort
            if entry.record(output):
                del self._journal[output.request_id]
        return step if len(live) == len(step.outputs) else replace(step, outputs=tuple(live))

    def forget(self, request_id: str) -> bool:
        """Drop a request that its client has left. True: the engine has it and must be told."""
        entry = self._journal.pop(request_id, None)
        if request_id == self._probation:
            self._probation = None
            self._suspect_left = True
        return entry is not None and entry.in_flight

    def crashed(self, *, killed: bool) -> list[JournalEntry]:
        """The engine is gone: all that it held are suspects. Returns, and drops, those proven guilty.

        `killed` from outside, by an operator or the OOM killer, is a crash in doubt; so is one that an aborted suspect
        may have caused.
        """
        strikes_allowed = STRIKES_IN_DOUBT if killed or self._suspect_left else STRIKES
        guilty = []
        for entry in self._journal.values():
            if entry.in_flight:
                entry.in_flight = False
                entry.strikes += 1
                if entry.strikes >= strikes_allowed:
                    guilty.append(entry)
        for entry in guilty:
            del self._journal[entry.request.request_id]
        self.waiting = deque(self._journal)
        self._probation = None
        self._suspect_left = False
        return guilty

    def dismiss(self) -> list[JournalEntry]:
        """Drop all live requests: there will be no engine for them. Returns them."""
        dismissed = list(self._journal.values())
        self._journal.clear()
        self.waiting.clear()
        return dismissed

"""Which live request goes to the engine next, and which one is guilty when the engine goes down.

Owns the journal of live requests, their strikes, and the queue of those the engine does not have. Promises: a request
that takes the engine down twice is singled out. Must not know: processes, sockets, the event loop, clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from quire_engine.types import MODEL_FAILED, GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_server.engine.journal import JournalEntry

STRIKES = 2  # crashes in a row, without a token in between, that prove a request guilty
STRIKES_IN_DOUBT = 3  # where the crash has another explanation: blame more slowly
CRASHES_ALONE = 3  # unexplained ones a request was in, the last of them with nobody beside it, whatever it got between
REMEMBERED_SECONDS = 600.0  # an unexplained crash is held against those who were in it for so long
_LONGER = 8  # times as many outputs on probation, after each unexplained crash more

# A request of our own: an engine that cannot compute even this is broken, and nobody's request is to blame.
PROBE = GenerationRequest(
    request_id="probe-of-a-new-engine",
    prompt_token_ids=(0,),
    sampling=SamplingParams(temperature=0.0),
    stop=StopParams(max_new_tokens=1),
)


class Recovery:
    """The live requests in order of arrival, and what each crash says about them.

    After a crash the requests that the engine held are suspects. The next engine first proves itself on `PROBE`; then
    they are sent one at a time: a suspect is on probation, with no other suspect and no newcomer in the engine, until
    it has made progress. So a second crash has one culprit, and the suspects that only shared a batch with it are never
    blamed. Whoever crashes the engine a few tokens later each time is on probation for longer each time.

    One kill from outside makes nobody a suspect: all are sent together, since one by one they would go on seconds
    later where the model is big. A second one without a token in between does.
    """

    def __init__(self) -> None:
        self.waiting: deque[str] = deque()  # not in the engine, in the order in which they go there
        self.culprits: list[GenerationRequest] = []  # made a step raise, as the engine found out by itself; to be taken
        self._journal: dict[str, JournalEntry] = {}
        self._probation: str | None = None  # the suspect in the engine that has not produced enough yet
        self._outputs_left = 0  # until its probation is over
        self._suspect_left = False  # the engine may still be computing a suspect that was aborted on probation
        self._proving = False  # the engine has not answered the probe yet

    def __len__(self) -> int:
        """Live requests."""
        return len(self._journal)

    @property
    def has_suspects(self) -> bool:
        """Whether newcomers have to wait until others, or the engine itself, are proven innocent."""
        return self._proving or self._probation is not None or bool(self.waiting)

    def admit(self, request: GenerationRequest) -> None:
        """Take in a request that is sent to the engine at once."""
        self._journal[request.request_id] = entry = JournalEntry(request)
        entry.in_flight = True

    def enqueue(self, request: GenerationRequest) -> None:
        """Take in a request that cannot be sent to an engine yet."""
        self._journal[request.request_id] = JournalEntry(request)
        self.waiting.append(request.request_id)

    def prove(self) -> GenerationRequest:
        """What a new engine is to be sent before anything else; nothing follows until it has answered."""
        self._proving = True
        return PROBE

    def next_request(self) -> GenerationRequest | None:
        """What the engine is to be sent now. None: nothing waits, or what waits must wait longer."""
        while self.waiting and self._probation is None and not self._proving:
            request_id = self.waiting.popleft()
            entry = self._journal.get(request_id)
            if entry is None or entry.in_flight or entry.held:
                continue  # aborted while it waited, or held
            if entry.strikes > 0 and entry.is_suspect:
                self._probation = request_id
                self._outputs_left = _LONGER ** max(0, len(entry.crashes) - 1)
            entry.in_flight = True
            return entry.resumed_request()
        return None

    def record(self, step: StepOutput) -> StepOutput:
        """Note what is about to be delivered. Returns the step without outputs of requests that are not live."""
        live = []
        for output in step.outputs:
            entry = self._journal.get(output.request_id)
            if entry is None:  # aborted while the output was on its way, or ours
                self._proving = self._proving and output.request_id != PROBE.request_id
                continue
            live.append(output)
            entry.strikes = 0
            if output.culprit and (output.error or "").startswith(MODEL_FAILED):
                self.culprits.append(entry.request)
            is_last = entry.record(output)
            if is_last:
                del self._journal[output.request_id]
            if output.request_id == self._probation:
                self._suspect_left = False  # the engine reads in order: it has seen the abort
                self._outputs_left -= 1
                if is_last or self._outputs_left <= 0:
                    self._probation = None
        return step if len(live) == len(step.outputs) else replace(step, outputs=tuple(live))

    def forget(self, request_id: str) -> bool:
        """Drop a request that its client has left. True: the engine has it and must be told."""
        entry = self._journal.pop(request_id, None)
        if request_id == self._probation:
            self._probation = None
            self._suspect_left = True
        return entry is not None and entry.in_flight

    def hold(self, request_id: str) -> bool:
        """No engine is to compute it for now. True: the engine has it and must be told."""
        entry = self._journal.get(request_id)
        if entry is None:
            return False
        entry.held = True
        if request_id == self._probation:  # it may be held for ever, and others wait
            self._probation = None
            self._suspect_left = True
        return entry.in_flight

    def release(self, request_id: str) -> bool:
        """It is to be computed again. True: the engine has it and must be told; else it waits to be sent."""
        entry = self._journal.get(request_id)
        if entry is None or not entry.held:
            return False
        entry.held = False
        if not entry.in_flight:
            self.waiting.append(request_id)
        return entry.in_flight

    def crashed(self, *, killed: bool, now: float = 0.0) -> list[JournalEntry]:
        """The engine is gone: all that it held are suspects. Returns, and drops, those proven guilty.

        `killed` from outside, by an operator or the OOM killer, is a crash in doubt; so is one that an aborted suspect
        may have caused. The `crashes` of who is guilty are those that it explains.
        """
        in_doubt = killed or self._suspect_left
        strikes_allowed = STRIKES_IN_DOUBT if in_doubt else STRIKES
        held = [entry for entry in self._journal.values() if entry.in_flight]
        guilty = []
        for entry in held:
            entry.in_flight = False
            was_suspect = entry.is_suspect and entry.strikes > 0  # then it was on probation, alone
            entry.strikes += 1
            entry.is_suspect = not killed or entry.strikes > 1
            if not killed:
                entry.crashes = [*(t for t in entry.crashes if t > now - REMEMBERED_SECONDS), now]
            is_alone = len(held) == 1 and not in_doubt
            if (was_suspect and entry.strikes >= strikes_allowed) or (is_alone and len(entry.crashes) >= CRASHES_ALONE):
                guilty.append(entry)
        for entry in guilty:
            del self._journal[entry.request.request_id]
        explained = {t for entry in guilty for t in entry.crashes}
        for entry in self._journal.values():
            entry.crashes = [t for t in entry.crashes if t not in explained]
        # Who was on trial is the first again: it then has nobody beside it, not even those who have passed theirs.
        first = [self._probation] if self._probation in self._journal else []
        others = (name for name, entry in self._journal.items() if name not in first and not entry.held)
        self.waiting = deque([*first, *others])
        self._probation = None
        self._suspect_left = self._proving = False
        return guilty

    def drop(self, is_to_go: Callable[[JournalEntry], bool]) -> list[JournalEntry]:
        """Drop the waiting requests of which this is true. Returns them."""
        dropped = [entry for entry in self._journal.values() if not entry.in_flight and is_to_go(entry)]
        for entry in dropped:
            del self._journal[entry.request.request_id]
        return dropped

    def dismiss(self) -> list[JournalEntry]:
        """Drop all live requests: there will be no engine for them. Returns them."""
        dismissed = list(self._journal.values())
        self._journal.clear()
        self.waiting.clear()
        return dismissed

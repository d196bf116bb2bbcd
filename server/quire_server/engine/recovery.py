"""Recovery after a crash of the engine: replays live requests, finds the culprit, quarantines it."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import sha256

from quire_engine.contract.types import (
    MODEL_FAILED,
    GenerationRequest,
    SamplingParams,
    StepOutput,
    StopParams,
    TokenOutput,
)

CRASHES_ALONE = 3  # unexplained crashes with a request, the last of them alone, that prove it guilty
REMEMBERED_SECONDS = 600.0  # how long an unexplained crash counts against its requests
_LONGER = 8  # factor on the outputs of a probation, per unexplained crash

# A request of the server's own: an engine that cannot compute even this is broken, and no client's request is to blame.
PROBE = GenerationRequest(
    request_id="probe-of-a-new-engine",
    prompt_token_ids=(0,),
    sampling=SamplingParams(temperature=0.0),
    stop=StopParams(max_new_tokens=1),
)


class Loss(Enum):
    """How an engine ended, which decides what is held against the requests that it had."""

    CRASH = "crash"  # by itself, or by a signal that its own doing has raised
    DOUBTFUL = "doubtful"  # killed while memory was short, or given up in silence: a request may be the cause
    KILL = "kill"  # by a SIGKILL or SIGSTOP from outside: requests do not cause those


# Losses in a row, without output in between, that prove a request guilty. From half of them on it is under suspicion,
# so that it was alone in the engine at the last ones. Programs that end others when memory is short do it with the
# signal of a kill, which is why those prove something at last.
STRIKES = {Loss.CRASH: 2, Loss.DOUBTFUL: 4, Loss.KILL: 16}


class Recovery:
    """The live requests in order of arrival, and the suspicion against each after crashes.

    After a crash, the requests that the engine had are suspects. The next engine must first answer `PROBE`. Then the
    suspects are sent one at a time: a suspect is on probation until it has made progress, and meanwhile the engine gets
    neither other suspects nor new requests. So a second crash has one culprit, and suspects that only shared a batch
    with it are never blamed. A request that crashes the engine after a few more tokens each time is on probation for
    longer each time.

    A kill by others makes no request a suspect until many in a row have met it without a token in between (`STRIKES`):
    all are sent together, because one by one they would take seconds more where the model is big.
    """

    def __init__(self) -> None:
        self.waiting: deque[str] = deque()  # requests that are not in the engine, in the order of sending
        self.culprits: list[GenerationRequest] = []  # requests that made a step raise; the caller removes them
        self._journal: dict[str, JournalEntry] = {}
        self._probation: str | None = None  # the suspect that is on probation in the engine
        self._outputs_left = 0  # outputs until its probation ends
        self._suspect_left = False  # the engine may still be computing a suspect that was aborted on probation
        self._proving = False  # whether the engine has yet to answer the probe

    def __len__(self) -> int:
        """Live requests."""
        return len(self._journal)

    @property
    def num_going(self) -> int:
        """Live requests that are not held."""
        return sum(not entry.held for entry in self._journal.values())

    @property
    def has_suspects(self) -> bool:
        """Whether new requests must wait, for the probe or for suspects."""
        return self._proving or self._probation is not None or bool(self.waiting)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is live."""
        return request_id in self._journal

    def request(self, request_id: str) -> GenerationRequest | None:
        """A live request; None: it is not live."""
        entry = self._journal.get(request_id)
        return None if entry is None else entry.request

    def suspects(self, request_id: str) -> bool:
        """Whether the request is live and under suspicion."""
        entry = self._journal.get(request_id)
        return entry is not None and entry.is_suspected

    def admit(self, entry: JournalEntry) -> None:
        """Record a request that is sent to the engine at once."""
        self._journal[entry.request.request_id] = entry
        entry.in_flight = True

    def enqueue(self, entry: JournalEntry) -> None:
        """Record a request that cannot be sent to an engine yet."""
        self._journal[entry.request.request_id] = entry
        if not entry.held:
            self.waiting.append(entry.request.request_id)

    def prove(self) -> GenerationRequest:
        """The probe, which a new engine must answer before it gets anything else."""
        self._proving = True
        return PROBE

    def next_request(self) -> GenerationRequest | None:
        """The next request to send to the engine. None: nothing waits, or it has to wait longer."""
        while self.waiting and self._probation is None and not self._proving:
            request_id = self.waiting.popleft()
            entry = self._journal.get(request_id)
            if entry is None or entry.in_flight or entry.held:
                continue  # aborted while it waited, or held
            if entry.is_suspected:
                self._probation = request_id
                self._outputs_left = _LONGER ** max(0, len(entry.crashes) - 1)
            entry.in_flight = True
            return entry.resumed_request()
        return None

    def record(self, step: StepOutput) -> StepOutput:
        """Record a step's outputs before their delivery; returns the step with outputs of live requests only."""
        live = []
        for output in step.outputs:
            entry = self._journal.get(output.request_id)
            if entry is None:  # aborted while the output was on its way, or the probe
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
        """Drop a request that its client has aborted. True: the engine has it and needs an abort."""
        entry = self.take(request_id)
        return entry is not None and entry.in_flight

    def hand_over(self, request_id: str) -> JournalEntry | None:
        """Give up a live request, for another engine to go on with it; what its engine still sends is dropped.

        None: it is not live, or under suspicion, which is proven or disproven here. The caller tells the engine, where
        `JournalEntry.leave_engine` says so.
        """
        return None if self.suspects(request_id) else self.take(request_id)

    def take(self, request_id: str) -> JournalEntry | None:
        """Drop a live request and return it; the engine may have it."""
        entry = self._journal.pop(request_id, None)
        if request_id == self._probation:
            self._probation = None
            self._suspect_left = True
        return entry

    def surrender(self, *, suspects: bool) -> list[JournalEntry]:
        """Drop the requests that no engine has, for another engine to go on with; `suspects`: those under suspicion
        too. Returns them in the order of arrival.
        """
        taken = self.drop(lambda entry: suspects or not entry.is_suspected)
        self.waiting = deque(name for name in self.waiting if name in self._journal)
        return taken

    def hold(self, request_id: str) -> bool:
        """Suspend a request. True: the engine has it and needs a hold."""
        entry = self._journal.get(request_id)
        if entry is None:
            return False
        entry.held = True
        if request_id == self._probation:  # otherwise a request that is held for ever would block the others
            self._probation = None
            self._suspect_left = True
        return entry.in_flight

    def release(self, request_id: str) -> bool:
        """Continue a held request. True: the engine has it and needs a release; otherwise it will be sent again."""
        entry = self._journal.get(request_id)
        if entry is None or not entry.held:
            return False
        entry.held = False
        if not entry.in_flight:
            self.waiting.append(request_id)
        return entry.in_flight

    def crashed(self, loss: Loss, *, now: float = 0.0) -> list[JournalEntry]:
        """The engine has ended: its requests become suspects. Returns, and drops, those proven guilty.

        It takes one loss more if an aborted suspect may have caused this one. The `crashes` of a guilty request are the
        ones that it explains.
        """
        is_crash = loss is Loss.CRASH
        proof = STRIKES[loss] + self._suspect_left
        held = [entry for entry in self._journal.values() if entry.in_flight]
        guilty = []
        for entry in held:
            entry.in_flight = False
            was_suspect = entry.is_suspected  # it was on probation
            entry.strikes += 1
            entry.is_suspect = entry.strikes >= STRIKES[loss] // 2
            if is_crash:
                entry.crashes = [*(t for t in entry.crashes if t > now - REMEMBERED_SECONDS), now]
            is_alone = len(held) == 1 and is_crash and not self._suspect_left
            if (was_suspect and entry.strikes >= proof) or (is_alone and len(entry.crashes) >= CRASHES_ALONE):
                guilty.append(entry)
        for entry in guilty:
            del self._journal[entry.request.request_id]
        explained = {t for entry in guilty for t in entry.crashes}
        for entry in self._journal.values():
            entry.crashes = [t for t in entry.crashes if t not in explained]
        # The request on probation is sent first again: then it is alone in the engine.
        first = [self._probation] if self._probation in self._journal else []
        others = (name for name, entry in self._journal.items() if name not in first and not entry.held)
        self.waiting = deque([*first, *others])
        self._probation = None
        self._suspect_left = self._proving = False
        return guilty

    def set_aside(self) -> None:
        """The engine has ended by order, which is held against no request: all wait, in the order of arrival."""
        for entry in self._journal.values():
            entry.in_flight = False
        self.waiting = deque(name for name, entry in self._journal.items() if not entry.held)
        self._probation = None
        self._suspect_left = self._proving = False

    def out_of_reach(self) -> None:
        """Nothing is known of the engine any more, which is held against no request: others will go on with them."""
        for entry in self._journal.values():
            entry.in_flight = False
        self.waiting.clear()
        self._probation = None

    def drop(self, should_drop: Callable[[JournalEntry], bool]) -> list[JournalEntry]:
        """Drop the requests outside the engine for which `should_drop` is true. Returns them."""
        dropped = [entry for entry in self._journal.values() if not entry.in_flight and should_drop(entry)]
        for entry in dropped:
            del self._journal[entry.request.request_id]
        return dropped

    def dismiss(self) -> list[JournalEntry]:
        """Drop all live requests, because there will be no engine. Returns them."""
        dismissed = list(self._journal.values())
        self._journal.clear()
        self.waiting.clear()
        return dismissed


@dataclass(slots=True)
class JournalEntry:
    """A live request and the tokens already delivered, per choice.

    `resumed_request` continues it on a new engine process exactly after the last delivered token.
    """

    request: GenerationRequest
    tokens: list[list[int]] = field(init=False)
    finished: set[int] = field(init=False)  # choices
    prompt_scored: bool = False  # the prompt's log-probabilities were delivered
    in_flight: bool = False  # whether the running engine has it
    held: bool = False  # suspended because its client does not read
    strikes: int = 0  # crashes while in flight, since its last output
    is_suspect: bool = False  # it may have caused the latest of these crashes
    crashes: list[float] = field(default_factory=list)  # times of unexplained crashes while in flight

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.request.n)]
        self.finished = set()

    @property
    def is_suspected(self) -> bool:
        """Whether it may have caused the latest crash and has had no output since."""
        return self.is_suspect and self.strikes > 0

    @property
    def has_tokens(self) -> bool:
        """Whether any output was delivered."""
        return any(self.tokens) or bool(self.finished)

    def record(self, output: TokenOutput) -> bool:
        """Record an output before its delivery. True: it is the request's last output."""
        self.tokens[output.choice].extend(output.token_ids)
        if output.prompt_logprobs is not None:
            self.prompt_scored = True
        if output.finish is not None:
            self.finished.add(output.choice)
        return len(self.finished) == self.request.n

    def leave_engine(self) -> bool:
        """Another engine will go on with it. True: the engine has it, and needs an abort."""
        was_in_flight, self.in_flight = self.in_flight, False
        return was_in_flight

    def resumed_request(self) -> GenerationRequest:
        """The request as a new engine must get it to continue with the next undelivered token."""
        if not (self.has_tokens or self.prompt_scored):
            return self.request
        sampling = self.request.sampling
        if self.prompt_scored and sampling.num_prompt_logprobs is not None:
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(
            self.request,
            sampling=sampling,
            resumed_token_ids=tuple(map(tuple, self.tokens)) if self.has_tokens else (),
            finished_choices=tuple(sorted(self.finished)),
        )

    def failure(self, message: str, *, code: str = "", culprit: bool) -> tuple[TokenOutput, ...]:
        """The last outputs of the choices that no engine will finish."""
        return tuple(
            TokenOutput(
                request_id=self.request.request_id,
                choice=choice,
                finish="error",
                error=message,
                error_code=code,
                culprit=culprit,
            )
            for choice in range(self.request.n)
            if choice not in self.finished
        )


QUARANTINE_SECONDS = 600.0
MOST_FINGERPRINTS = 1024


class Quarantine:
    """Fingerprints of requests that crashed the engine or made a step raise: equal requests are refused for a while.

    Bounded in number and in time; beyond the bound, the fingerprints that were not used for longest are dropped. No
    prompt is kept. A check costs nothing while there is no fingerprint.
    """

    def __init__(self, *, seconds: float = QUARANTINE_SECONDS, most: int = MOST_FINGERPRINTS) -> None:
        self._seconds = seconds
        self._most = most
        self._until: OrderedDict[bytes, float] = OrderedDict()  # end times by fingerprint, in order of last use

    def __len__(self) -> int:
        """The number of fingerprints, expired ones included."""
        return len(self._until)

    def add(self, request: GenerationRequest, now: float) -> bytes:
        """Refuse requests like this one from now on; returns the fingerprint."""
        key = fingerprint(request)
        self._until[key] = now + self._seconds
        self._until.move_to_end(key)
        while len(self._until) > self._most:
            self._until.popitem(last=False)
        return key

    def refusal(self, request: GenerationRequest, now: float) -> float | None:
        """Seconds for which requests like this one are still refused; None: they are not."""
        if not self._until:
            return None
        key = fingerprint(request)
        until = self._until.get(key)
        if until is None:
            return None
        if until <= now:
            del self._until[key]
            return None
        # The end time stays: a client that retries again and again must not be refused for ever.
        self._until.move_to_end(key)
        return until - now


def fingerprint(request: GenerationRequest) -> bytes:
    """SHA-256 of a request's computation: prompt, salt and sampling.

    The seed is left out: requests without one get a random one, and it only decides which token is drawn. Names, times,
    priorities and the length limit do not affect what is computed first.
    """
    digest = sha256(array("q", request.prompt_token_ids).tobytes())
    digest.update(repr((request.cache_salt, request.n, request.pooling, request.beam)).encode("utf-8", "surrogatepass"))
    digest.update(repr(replace(request.sampling, seed=0)).encode("utf-8", "surrogatepass"))
    return digest.digest()

"""Which live request goes to the engine next, and which one is guilty when the engine goes down."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256

from quire_engine.types import MODEL_FAILED, GenerationRequest, SamplingParams, StepOutput, StopParams, TokenOutput

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


@dataclass(slots=True)
class JournalEntry:
    """A live request and the tokens already delivered, per choice.

    The request it makes for a new engine process continues exactly where the client stands.
    """

    request: GenerationRequest
    tokens: list[list[int]] = field(init=False)
    finished: set[int] = field(init=False)  # choices
    prompt_scored: bool = False  # the prompt's log-probabilities were delivered
    in_flight: bool = False  # the running engine has it
    held: bool = False  # its client takes nothing: no engine is to compute it
    strikes: int = 0  # crashes while in flight since it last made progress
    is_suspect: bool = False  # the latest of these may have been its doing
    crashes: list[float] = field(default_factory=list)  # when, of those while in flight that nothing explains yet

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.request.n)]
        self.finished = set()

    @property
    def has_tokens(self) -> bool:
        """Whether an engine has computed something for it."""
        return any(self.tokens) or bool(self.finished)

    def record(self, output: TokenOutput) -> bool:
        """Note what is about to be delivered. True: it is the request's last output."""
        self.tokens[output.choice].extend(output.token_ids)
        if output.prompt_logprobs is not None:
            self.prompt_scored = True
        if output.finish is not None:
            self.finished.add(output.choice)
        return len(self.finished) == self.request.n

    def resumed_request(self) -> GenerationRequest:
        """The request as a fresh engine must see it to go on with the next undelivered token."""
        sampling = self.request.sampling
        if self.prompt_scored and sampling.num_prompt_logprobs is not None:
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(
            self.request,
            sampling=sampling,
            resumed_token_ids=tuple(map(tuple, self.tokens)) if self.has_tokens else (),
            finished_choices=tuple(sorted(self.finished)),
        )

    def failure(self, message: str, *, culprit: bool) -> tuple[TokenOutput, ...]:
        """The last outputs of the choices that no engine will finish."""
        return tuple(
            TokenOutput(
                request_id=self.request.request_id, choice=choice, finish="error", error=message, culprit=culprit
            )
            for choice in range(self.request.n)
            if choice not in self.finished
        )


QUARANTINE_SECONDS = 600.0
MOST_FINGERPRINTS = 1024


class Quarantine:
    """What has taken the engine down, or made a step raise: its like is refused for a while.

    Fingerprints of proven culprits, bounded in number and in time; beyond the bound the ones that were not asked for
    longest are forgotten. Nothing of a prompt is kept, and a look costs nothing while nothing is remembered.
    """

    def __init__(self, *, seconds: float = QUARANTINE_SECONDS, most: int = MOST_FINGERPRINTS) -> None:
        self._seconds = seconds
        self._most = most
        self._until: OrderedDict[bytes, float] = OrderedDict()  # by fingerprint; the last asked for is the last

    def __len__(self) -> int:
        """Fingerprints that are remembered, those whose time is over included."""
        return len(self._until)

    def add(self, request: GenerationRequest, now: float) -> bytes:
        """Refuse the like of a request from now on; its fingerprint."""
        key = fingerprint(request)
        self._until[key] = now + self._seconds
        self._until.move_to_end(key)
        while len(self._until) > self._most:
            self._until.popitem(last=False)
        return key

    def refusal(self, request: GenerationRequest, now: float) -> float | None:
        """Seconds for which the like of this request is still refused; None: it is not."""
        if not self._until:
            return None
        key = fingerprint(request)
        until = self._until.get(key)
        if until is None:
            return None
        if until <= now:
            del self._until[key]
            return None
        # Asking does not prolong it: whoever asks again and again must not be refused for ever.
        self._until.move_to_end(key)
        return until - now


def fingerprint(request: GenerationRequest) -> bytes:
    """SHA-256 of what a request makes the engine compute: prompt, salt and how tokens are chosen.

    The seed is left out: whoever brings none gets a new one each time, and it only decides which token is drawn.
    Names, times, priorities and how long the answer may be say nothing about what is computed first.
    """
    digest = sha256(array("q", request.prompt_token_ids).tobytes())
    digest.update(repr((request.cache_salt, request.n, request.pooling, request.beam)).encode("utf-8", "surrogatepass"))
    digest.update(repr(replace(request.sampling, seed=0)).encode("utf-8", "surrogatepass"))
    return digest.digest()

"""Which requests are taken now, and when those that are refused should come again."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire_engine.types import EngineStats, GenerationRequest, ServiceClass, TenantStats
from quire_server.errors import QueueFull
from quire_server.metrics.metrics import TenantMetrics

# Of the times that refused requests are told. From 60 on, older OpenAI SDKs retry when they like; none obeys above 120.
LONGEST_SECONDS = 59.0
LEAST_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on the requests that have been accepted and are unfinished."""

    max_sequences: int  # a request with n choices counts n
    max_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """What one tenant may have; None is without a limit."""

    name: str
    weight: float = 1.0
    service_class: ServiceClass = "interactive"
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_queued: int | None = None  # sequences that wait
    max_running: int | None = None  # sequences that run


NOBODY = Tenant(name="")  # those whose key stands for no tenant


class Tenants:
    """The tenants that an operator has named, by the digests of their keys."""

    def __init__(self, by_digest: Mapping[str, Tenant] | None = None, *, names_of_keys: bool = False) -> None:
        self._by_digest = dict(by_digest or {})
        self._names_of_keys = names_of_keys  # without a list of tenants, each key with a name is one

    @property
    def all(self) -> tuple[Tenant, ...]:
        """Each once; of keys with names there is no list."""
        return tuple({tenant.name: tenant for tenant in self._by_digest.values()}.values())

    def of(self, key_digest: str, key_name: str) -> Tenant:
        """The tenant of the key that was brought; both are empty where none was needed."""
        found = self._by_digest.get(key_digest)
        if found is not None:
            return found
        return Tenant(name=key_name) if self._names_of_keys and key_name else NOBODY


_TENANT_WINDOW_SECONDS = 30.0
_TENANT_GUESS_SECONDS = 3.0  # in which one sequence of the tenant ends, while none has


class TenantGate:
    """In front of the queue, for tenants of the operator's list: what is over their rates and quotas is refused.

    Who comes again at the time it was told is taken, and nothing is used up by what is refused.
    """

    def __init__(self, tenants: Iterable[Tenant], metrics: TenantMetrics, now: float) -> None:
        self._lanes = {tenant.name: _Lane(tenant, now) for tenant in tenants}
        self._metrics = metrics

    def check(self, request: GenerationRequest, now: float) -> None:
        """Raises QueueFull where the request is over its tenant's rate or quota."""
        lane = self._lanes.get(request.tenant)
        if lane is None:
            return
        refusal = lane.refusal(request, now)
        if refusal is not None:
            reason, what, seconds = refusal
            self._metrics.refused(request.tenant, reason)
            raise QueueFull(f"the tenant's {what} is reached", retry_after_seconds=seconds, code=reason)

    def take(self, request: GenerationRequest, now: float) -> None:
        """The request that was checked is accepted."""
        lane = self._lanes.get(request.tenant)
        if lane is not None:
            lane.take(request, now)
            self._metrics.accepted(request.tenant)

    def release(self, request: GenerationRequest, now: float) -> None:
        """An accepted request has ended, one way or another."""
        lane = self._lanes.get(request.tenant)
        if lane is not None:
            lane.release(request.n, now)

    def observe(self, stats: Iterable[TenantStats], now: float) -> None:
        """What the engine has given to whom so far: output is paid for when it has come."""
        for each in stats:
            lane = self._lanes.get(each.tenant)
            if lane is not None:
                prompt, output = lane.observe(each, now)
                self._metrics.computed(each.tenant, prompt=prompt, output=output)


class _Lane:
    """One tenant's."""

    def __init__(self, tenant: Tenant, now: float) -> None:
        self._tenant = tenant
        self._requests = None if tenant.requests_per_minute is None else TokenBucket(tenant.requests_per_minute, now)
        self._tokens = None if tenant.tokens_per_minute is None else TokenBucket(tenant.tokens_per_minute, now)
        self._promised_requests, self._promised_tokens = Promises(), Promises()
        self._unfinished = self._running = 0  # sequences
        self._ends: deque[tuple[float, int]] = deque()
        self._seen = TenantStats(tenant=tenant.name)

    def refusal(self, request: GenerationRequest, now: float) -> tuple[str, str, float] | None:
        """Why it cannot be taken: the code, what is reached, and the seconds until it can."""
        waiting = self._unfinished - self._running
        limit = self._tenant.max_queued
        if limit is not None and waiting and waiting + request.n > limit:
            return "tenant_queue", "quota of waiting requests", self._until_room(waiting + request.n - limit, now)
        seconds = _wait(self._requests, self._promised_requests, request, 1, now)
        if seconds:
            return "tenant_requests", "rate of requests", seconds
        seconds = _wait(self._tokens, self._promised_tokens, request, len(request.prompt_token_ids), now)
        return ("tenant_tokens", "rate of tokens", seconds) if seconds else None

    def take(self, request: GenerationRequest, now: float) -> None:
        if self._requests is not None:
            self._requests.take(1, now)
        if self._tokens is not None:
            self._tokens.take(len(request.prompt_token_ids), now)
        self._unfinished += request.n

    def release(self, sequences: int, now: float) -> None:
        self._unfinished -= sequences
        self._running = min(self._running, self._unfinished)
        self._ends.append((now, sequences))

    def observe(self, stats: TenantStats, now: float) -> tuple[int, int]:
        """New tokens of prompts and of output since the last look; totals begin again with a new engine."""
        seen, self._seen = self._seen, stats
        self._running = min(stats.running, self._unfinished)
        prompt = _growth(stats.total_prompt_tokens, seen.total_prompt_tokens)
        output = _growth(stats.total_output_tokens, seen.total_output_tokens)
        if self._tokens is not None and output:
            self._tokens.take(output, now)
        return prompt, output

    def _until_room(self, sequences: int, now: float) -> float:
        """Seconds in which so many of the tenant's sequences end, by how many did of late."""
        while self._ends and self._ends[0][0] < now - _TENANT_WINDOW_SECONDS:
            self._ends.popleft()
        if not self._ends:
            return sequences * _TENANT_GUESS_SECONDS
        seconds = max(now - self._ends[0][0], 1.0)
        return max(1.0, sequences * seconds / sum(count for _, count in self._ends))


def _wait(
    bucket: TokenBucket | None, promises: Promises, request: GenerationRequest, amount: float, now: float
) -> float:
    """Seconds until the request may come again; 0: it is taken now. Those who were told a time come before others."""
    if bucket is None or promises.redeem(request, now):
        return 0.0
    seconds = bucket.wait(amount + promises.reserved(now), now)
    if promises.reserved(now):  # a full bucket is not enough for all who wait in line
        seconds = max(seconds, bucket.wait(amount, now) + bucket.seconds(promises.reserved(now)))
    return promises.place(request, now=now, seconds=seconds, amount=amount) if seconds else 0.0


def _growth(total: int, before: int) -> int:
    return total - before if total >= before else total


MARGIN = 0.8  # of the target: estimates are not exact, and a step has an end
_KEEP = 0.95  # of what was measured before, with each step
_FIRST_STEPS = 4  # whole steps of prompts that are accepted before anything is known


class TtftGate:
    """Refuses requests whose first token would come later than a target, and says when it would not.

    The time to the first token is what is to be computed before it, over the rate at which prompts are computed while
    some wait: measured over all steps, those in which nothing of a prompt could be computed included, so that a lack of
    seats or memory counts as what it is for those who wait. Batch requests have no such target.
    """

    def __init__(self, target: float, *, step_tokens: int) -> None:
        self._target = target * MARGIN
        self._first_tokens = _FIRST_STEPS * step_tokens
        self._pending: dict[str, int] = {}  # prompt tokens, by request
        self._num_pending = 0
        self._promises = Promises()
        self._tokens = self._seconds = 0.0
        self._last_step: float | None = None  # None: nothing waited
        self._last_hits = 0

    @property
    def rate(self) -> float | None:
        """Prompt tokens a second; None while nothing is known."""
        return self._tokens / self._seconds if self._seconds > 0 and self._tokens > 0 else None

    def refusal(self, request: GenerationRequest, now: float) -> float | None:
        """Seconds until the request may come again; None: it may come now. To be asked once for each request."""
        if not _has_target(request) or self._promises.redeem(request, now):
            return None
        own = len(request.prompt_token_ids)
        ahead = self._num_pending + self._promises.reserved(now)
        rate = self.rate
        if rate is None:
            if not ahead or ahead + own <= self._first_tokens:
                return None
            return self._promises.place(request, now=now, seconds=LEAST_SECONDS, amount=own)
        predicted = (ahead + own) / rate
        if predicted <= self._target or not ahead:
            return None
        seconds = max(predicted - self._target, LEAST_SECONDS)
        return self._promises.place(request, now=now, seconds=seconds, amount=own)

    def accept(self, request: GenerationRequest, now: float) -> None:
        """The request is in the queue."""
        if not _has_target(request):
            return
        if not self._pending:
            self._last_step = now
        tokens = len(request.prompt_token_ids)
        self._pending[request.request_id] = tokens
        self._num_pending += tokens

    def answered(self, request_id: str) -> None:
        """Its first token has come, or it has ended without one."""
        self._num_pending -= self._pending.pop(request_id, 0)

    def observe(self, stats: EngineStats, now: float) -> None:
        """A step has ended, of whose outputs those with a first token have been told before."""
        hits = stats.total_prefix_hit_tokens
        found, self._last_hits = max(hits - self._last_hits, 0), hits
        is_full = bool(self._pending) or self.rate is None  # else it had no more to compute than it did
        if self._last_step is not None and is_full:
            self._tokens = self._tokens * _KEEP + stats.prefill_tokens + found
            self._seconds = self._seconds * _KEEP + now - self._last_step
        self._last_step = now if self._pending else None


def _has_target(request: GenerationRequest) -> bool:
    return request.service_class == "interactive" and not request.pooling


_LONGEST_STEP_SECONDS = 4.0  # between two places, so that even a line at a crawl has some
_SEAT_GUESS_SECONDS = 3.0  # that a sequence keeps its seat, while none has ended
_SHORTEST_SECONDS = 0.001
_SEAT_WINDOW_SECONDS = 30.0


class SeatMeter:
    """How fast sequences end when all seats are taken, by how long those of the last 30 seconds kept theirs.

    Counts seat-seconds rather than seconds: a server that was idle is not slow. What the taken seats have been used for
    is a pool, of which each end takes its seat's share; so the first end of many that began together speaks for all.
    """

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._taken = 0  # seats
        self._changed_at = 0.0
        self._pool = 0.0  # seat-seconds of the taken seats
        self._ended: deque[tuple[float, int, float]] = deque()  # time, sequences, their seat-seconds
        self._num_ended = 0
        self._seat_seconds = 0.0  # of those that ended

    def observe(self, now: float, *, sequences: int, ended: int = 0) -> None:
        """From now on so many sequences are unfinished, waiting ones included; `ended` have just left."""
        self._pool += self._taken * (now - self._changed_at)
        self._changed_at = now
        if ended and self._taken:
            share = self._pool * min(ended / self._taken, 1.0)
            self._pool -= share
            self._ended.append((now, ended, share))
            self._num_ended += ended
            self._seat_seconds += share
        self._taken = min(sequences, self._seats)
        self._trim(now)

    def rate(self, now: float) -> float:
        """Sequences a second, more than 0."""
        self._trim(now)
        so_far = self._pool / self._taken + now - self._changed_at if self._taken else 0.0
        if self._num_ended:
            seconds = max(self._seat_seconds / self._num_ended, so_far)
        else:
            seconds = max(_SEAT_GUESS_SECONDS, 2 * so_far)  # half of their work is done, by the usual guess
        return self._seats / max(seconds, _SHORTEST_SECONDS)

    def _trim(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - _SEAT_WINDOW_SECONDS:
            _, ended, share = self._ended.popleft()
            self._num_ended -= ended
            self._seat_seconds -= share
        if not self._ended:
            self._seat_seconds = 0.0  # no rest of rounding


class RetryLine:
    """When a refused client should come again: a place in time behind those refused before it, one place for each.

    The first place is when half of the queue has drained: later than the first free seat, so that what the estimate is
    wrong by finds a place in the queue, and early enough that no seat stays empty.
    """

    def __init__(self) -> None:
        self._last_place = float("-inf")  # a time

    def wait(self, now: float, *, sequences: int, waiting: int, rate: float) -> float:
        """Seconds, `LEAST_SECONDS` to `LONGEST_SECONDS`, for a refused request of so many sequences.

        `waiting` are those in the queue, `rate` is how many leave it in a second. A line that gets too long begins
        again at its front: who finds the queue full again gets a new place by what has been measured until then.
        """
        front = now + min(max(waiting / 2 / rate, LEAST_SECONDS), LONGEST_SECONDS / 2)
        place = max(front, self._last_place + min(sequences / rate, _LONGEST_STEP_SECONDS))
        if place > now + LONGEST_SECONDS:
            place = front
        self._last_place = place
        return place - now


GRACE_SECONDS = 3.0  # Retry-After is whole seconds for most, and the way back takes some
_MOST = 10_000  # different requests with promises at once
_MOST_ALIKE = 8
_CLOCK_SECONDS = 0.001  # what a time in milliseconds may be short of


@dataclass(frozen=True, slots=True)
class _Promise:
    at: float
    amount: float


class Promises:
    """What refused requests have been told: they are taken when they come again at that time.

    Each promise is kept for one request, which is known by its content: the same prompt with the same limits is the
    same request. It is forgotten a few seconds after its time. Without promises the room that a refused client waits
    for would be taken by those who come in the meantime, and the time that it was told would be a guess.
    """

    def __init__(self) -> None:
        self._by_ticket: dict[int, list[_Promise]] = {}
        self._reserved = 0.0
        self._next_look = 0.0

    def reserved(self, now: float) -> float:
        """What is promised to those who may still come."""
        if now >= self._next_look:
            self._forget(now)
            self._next_look = now + 0.5
        return self._reserved

    def redeem(self, request: GenerationRequest, now: float) -> bool:
        """Whether the request was promised this moment, or an earlier one; the promise is used up."""
        key = ticket(request)
        promises = self._by_ticket.get(key, [])
        while promises and promises[0].at <= now + _CLOCK_SECONDS:
            promise = promises.pop(0)
            self._drop(key, promise)
            if promise.at + GRACE_SECONDS >= now:
                return True
        return False

    def place(self, request: GenerationRequest, *, now: float, seconds: float, amount: float) -> float:
        """Seconds after which the request may come again.

        Clients may send the same request, so each refusal has a time of its own, up to a number: who comes again and
        again before its time is told the last one.
        """
        known = self._by_ticket.get(ticket(request), [])
        if len(known) >= _MOST_ALIKE and known[-1].at > now:
            return known[-1].at - now
        if seconds > LONGEST_SECONDS or len(self._by_ticket) >= _MOST:
            return LONGEST_SECONDS  # too far away to be promised
        insort(self._by_ticket.setdefault(ticket(request), []), _Promise(now + seconds, amount), key=_time)
        self._reserved += amount
        return seconds

    def _forget(self, now: float) -> None:
        for key, promises in list(self._by_ticket.items()):
            while promises and promises[0].at + GRACE_SECONDS < now:
                self._drop(key, promises.pop(0))

    def _drop(self, key: int, promise: _Promise) -> None:
        self._reserved -= promise.amount
        if not self._by_ticket[key]:
            del self._by_ticket[key]
        if not self._by_ticket:
            self._reserved = 0.0  # no rest of rounding


def _time(promise: _Promise) -> float:
    return promise.at


def ticket(request: GenerationRequest) -> int:
    """Of two requests with the same content the same number."""
    return hash((request.tenant, request.prompt_token_ids, request.stop.max_new_tokens, request.n))


MINUTE = 60.0


class TokenBucket:
    """A rate per minute, saved up for one minute at most; full at first. What is taken beyond it is a debt."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._most = per_minute
        self._level = per_minute
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until so much is there; more than a minute's rate is asked of a full bucket."""
        self._fill(now)
        return max(0.0, (min(amount, self._most) - self._level) * MINUTE / self._most)

    def seconds(self, amount: float) -> float:
        """In which so much comes."""
        return amount * MINUTE / self._most

    def take(self, amount: float, now: float) -> None:
        """So much is used."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + max(now - self._at, 0.0) * self._most / MINUTE)
        self._at = now

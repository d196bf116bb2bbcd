"""Admission control: decides which requests are accepted now, and when refused ones should be sent again."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from quire_engine.contract.types import EngineStats, GenerationRequest, TenantStats
from quire_server.engine.budgets import LONGEST_SECONDS, check_budgets
from quire_server.engine.tenants import Tenant
from quire_server.errors import BudgetSpent, QueueFull
from quire_server.metrics.metrics import TenantMetrics
from quire_server.metrics.usage import UsageBook

LEAST_SECONDS = 1.0  # of Retry-After


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits on the accepted and unfinished requests."""

    max_sequences: int  # a request with n choices counts n
    max_prompt_tokens: int | None = None


_TENANT_WINDOW_SECONDS = 30.0
_TENANT_GUESS_SECONDS = 3.0  # assumed seconds per sequence until one of the tenant has ended


class TenantGate:
    """Admission control per tenant, before the queue: refuses requests above the tenant's rates and quotas.

    A refused client that comes back at the time of its Retry-After is accepted. A refusal uses up nothing of a rate.
    """

    def __init__(self, tenants: Iterable[Tenant], metrics: TenantMetrics, now: float) -> None:
        self._by_name = {tenant.name: _TenantState(tenant, now) for tenant in tenants}
        self._metrics = metrics
        self._seen: dict[str, TenantStats] = {}  # the engine's latest statistics

    def change(self, tenants: Iterable[Tenant], now: float) -> None:
        """Other tenants and limits hold from now on.

        Rates that are as before keep their levels, and tenants that were taken away are known until their requests end.
        """
        kept = {name: state for name, state in self._by_name.items() if state.unfinished}
        for tenant in tenants:
            state = self._by_name.get(tenant.name)
            if state is None:
                state = _TenantState(tenant, now)
            else:
                state.change(tenant, now)
            kept[tenant.name] = state
        self._by_name = kept

    def check_budget(self, tenant: str, prompt_tokens: int, usage: UsageBook) -> None:
        """Check the budgets for all prompts of a client's request together. Raises BudgetSpent."""
        state = self._by_name.get(tenant)
        if state is None:
            return
        try:
            check_budgets(state.tenant, prompt_tokens, usage)
        except BudgetSpent as refusal:
            self._metrics.refused(state.tenant.name, refusal.code)
            raise

    def check(self, request: GenerationRequest, now: float) -> None:
        """Raises QueueFull if the request is above its tenant's rate or quota."""
        state = self._by_name.get(request.tenant)
        if state is None:
            return
        refusal = state.refusal(request, now)
        if refusal is not None:
            reason, what, seconds = refusal
            self._metrics.refused(request.tenant, reason)
            raise QueueFull(f"the tenant's {what} is reached", retry_after_seconds=seconds, code=reason)

    def take(self, request: GenerationRequest, now: float) -> None:
        """Charge an accepted request, after its check."""
        state = self._by_name.get(request.tenant)
        if state is not None:
            state.take(request, now)
            self._metrics.accepted(request.tenant)

    def release(self, request: GenerationRequest, now: float) -> None:
        """An accepted request has ended."""
        state = self._by_name.get(request.tenant)
        if state is not None:
            state.release(request.n, now)

    def observe(self, stats: Iterable[TenantStats], now: float) -> None:
        """Charge each tenant's new output tokens, from the engine's statistics."""
        for each in stats:
            seen = self._seen.get(each.tenant)
            self._seen[each.tenant] = each
            state = self._by_name.get(each.tenant)
            if state is not None:
                prompt, output = state.observe(each, seen or TenantStats(tenant=each.tenant), now)
                self._metrics.computed(each.tenant, prompt=prompt, output=output)


class _TenantState:
    """The rates, promises and sequences of one tenant."""

    def __init__(self, tenant: Tenant, now: float) -> None:
        self.tenant = tenant
        self._requests = _bucket(tenant.requests_per_minute, now)
        self._tokens = _bucket(tenant.tokens_per_minute, now)
        self._promised_requests, self._promised_tokens = Promises(), Promises()
        self.unfinished = self._running = 0  # sequences
        self._ends: deque[tuple[float, int]] = deque()

    def change(self, tenant: Tenant, now: float) -> None:
        """Take over other limits. A rate that has not changed keeps its level, another one begins anew."""
        if tenant.requests_per_minute != self.tenant.requests_per_minute:
            self._requests, self._promised_requests = _bucket(tenant.requests_per_minute, now), Promises()
        if tenant.tokens_per_minute != self.tenant.tokens_per_minute:
            self._tokens, self._promised_tokens = _bucket(tenant.tokens_per_minute, now), Promises()
        self.tenant = tenant

    def refusal(self, request: GenerationRequest, now: float) -> tuple[str, str, float] | None:
        """Why a request is refused, as (code, limit in words, seconds until it can be accepted); None: it is not."""
        waiting = self.unfinished - self._running
        limit = self.tenant.max_queued
        if limit is not None and waiting and waiting + request.n > limit:
            return "tenant_queue", "quota of waiting requests", self._seconds_until(waiting + request.n - limit, now)
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
        self.unfinished += request.n

    def release(self, sequences: int, now: float) -> None:
        self.unfinished -= sequences
        self._running = min(self._running, self.unfinished)
        self._ends.append((now, sequences))

    def observe(self, stats: TenantStats, seen: TenantStats, now: float) -> tuple[int, int]:
        """The new prompt and output tokens since `seen`; totals begin again with a new engine process."""
        self._running = min(stats.running, self.unfinished)
        prompt = _growth(stats.total_prompt_tokens, seen.total_prompt_tokens)
        output = _growth(stats.total_output_tokens, seen.total_output_tokens)
        if self._tokens is not None and output:
            self._tokens.take(output, now)
        return prompt, output

    def _seconds_until(self, sequences: int, now: float) -> float:
        """Seconds until `sequences` sequences of the tenant have ended, at the rate of the last 30 seconds."""
        while self._ends and self._ends[0][0] < now - _TENANT_WINDOW_SECONDS:
            self._ends.popleft()
        if not self._ends:
            return sequences * _TENANT_GUESS_SECONDS
        seconds = max(now - self._ends[0][0], 1.0)
        return max(1.0, sequences * seconds / sum(count for _, count in self._ends))


def _bucket(per_minute: float | None, now: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, now)


def _wait(
    bucket: TokenBucket | None, promises: Promises, request: GenerationRequest, amount: float, now: float
) -> float:
    """Seconds until the request may come again; 0: accepted now. Refused clients with a promise come before others."""
    if bucket is None or promises.redeem(request, now):
        return 0.0
    seconds = bucket.wait(amount + promises.reserved(now), now)
    if promises.reserved(now):  # a full bucket may not cover all promised requests
        seconds = max(seconds, bucket.wait(amount, now) + bucket.seconds(promises.reserved(now)))
    return promises.place(request, now=now, seconds=seconds, amount=amount) if seconds else 0.0


def _growth(total: int, before: int) -> int:
    return total - before if total >= before else total


MARGIN = 0.8  # share of the target: estimates are inexact, and a step runs to its end
_KEEP = 0.95  # factor on older measurements, per step
_FIRST_STEPS = 4  # full steps of prompt tokens that are accepted before a rate is known


class TtftGate:
    """Refuses requests whose time to first token (TTFT) would exceed a target, and says when it would not.

    The predicted TTFT is the number of prompt tokens to compute until then, divided by the rate of prompt tokens while
    some wait. The rate counts all steps, also those that computed no prompt tokens, so that a lack of seats or memory
    lowers it. Batch requests have no such target.
    """

    def __init__(self, target: float, *, step_tokens: int) -> None:
        self._target = target * MARGIN
        self._first_tokens = _FIRST_STEPS * step_tokens
        self._pending: dict[str, int] = {}  # prompt tokens without a first token yet, by request
        self._num_pending = 0
        self._promises = Promises()
        self._tokens = self._seconds = 0.0
        self._last_step: float | None = None  # time; None: no request waited
        self._last_hits = 0

    @property
    def rate(self) -> float | None:
        """Prompt tokens per second; None while no rate is known."""
        return self._tokens / self._seconds if self._seconds > 0 and self._tokens > 0 else None

    def refusal(self, request: GenerationRequest, now: float) -> float | None:
        """Seconds until the request may come again; None: it may come now. Call it once per request."""
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
        """Count the prompt of an accepted request."""
        if not _has_target(request):
            return
        if not self._pending:
            self._last_step = now
        tokens = len(request.prompt_token_ids)
        self._pending[request.request_id] = tokens
        self._num_pending += tokens

    def answered(self, request_id: str) -> None:
        """Take a request's prompt off the pending tokens: its first token has come, or it has ended without one."""
        self._num_pending -= self._pending.pop(request_id, 0)

    def observe(self, stats: EngineStats, now: float) -> None:
        """Measure a step; `answered` was called before for its first tokens."""
        hits = stats.total_prefix_hit_tokens
        found, self._last_hits = max(hits - self._last_hits, 0), hits
        is_full = bool(self._pending) or self.rate is None  # otherwise the step may have lacked prompt tokens
        if self._last_step is not None and is_full:
            self._tokens = self._tokens * _KEEP + stats.prefill_tokens + found
            self._seconds = self._seconds * _KEEP + now - self._last_step
        self._last_step = now if self._pending else None


def _has_target(request: GenerationRequest) -> bool:
    return request.service_class == "interactive" and not request.pooling


_LONGEST_STEP_SECONDS = 4.0  # most seconds between two retry times, at a low rate
_SEAT_GUESS_SECONDS = 3.0  # assumed seconds of a sequence in its seat, until one has ended
_SHORTEST_SECONDS = 0.001
_SEAT_WINDOW_SECONDS = 30.0


class SeatMeter:
    """Measures how fast sequences end while all seats are taken, from those that ended in the last 30 seconds.

    It counts seat-seconds rather than seconds, so that idle time does not lower the rate. The seat-seconds of the
    sequences that still run form a pool, and each end takes one seat's share of it. So the first end of many sequences
    that began together counts for all of them.
    """

    def __init__(self, seats: int) -> None:
        self._seats = seats
        self._taken = 0  # seats
        self._changed_at = 0.0
        self._pool = 0.0  # seat-seconds of the taken seats
        self._ended: deque[tuple[float, int, float]] = deque()  # time, sequences, their seat-seconds
        self._num_ended = 0
        self._seat_seconds = 0.0  # seat-seconds of the ended sequences

    def resize(self, seats: int) -> None:
        """Set the number of seats from now on."""
        self._seats = seats

    def observe(self, now: float, *, sequences: int, ended: int = 0) -> None:
        """Now `sequences` are unfinished, waiting ones included, and `ended` have just ended."""
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
        """Sequences that end per second; more than 0."""
        self._trim(now)
        so_far = self._pool / self._taken + now - self._changed_at if self._taken else 0.0
        if self._num_ended:
            seconds = max(self._seat_seconds / self._num_ended, so_far)
        else:
            seconds = max(_SEAT_GUESS_SECONDS, 2 * so_far)  # on average half of a running sequence's time has passed
        return self._seats / max(seconds, _SHORTEST_SECONDS)

    def _trim(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - _SEAT_WINDOW_SECONDS:
            _, ended, share = self._ended.popleft()
            self._num_ended -= ended
            self._seat_seconds -= share
        if not self._ended:
            self._seat_seconds = 0.0  # no rounding errors remain


class RetryLine:
    """Assigns refused clients the times at which to come again, one after the other.

    The first time is when half of the queue has drained. That is later than the first free seat, so that an error of
    the estimate finds room in the queue, and early enough that no seat stays empty.
    """

    def __init__(self) -> None:
        self._last_place = float("-inf")  # the latest assigned time

    def wait(self, now: float, *, sequences: int, waiting: int, rate: float) -> float:
        """Seconds, `LEAST_SECONDS` to `LONGEST_SECONDS`, for a refused request of `sequences` sequences.

        `waiting`: sequences in the queue; `rate`: sequences that end per second. When the line gets too long it begins
        again at its front; a client that is refused again gets a new time from newer measurements.
        """
        front = now + min(max(waiting / 2 / rate, LEAST_SECONDS), LONGEST_SECONDS / 2)
        place = max(front, self._last_place + min(sequences / rate, _LONGEST_STEP_SECONDS))
        if place > now + LONGEST_SECONDS:
            place = front
        self._last_place = place
        return place - now


GRACE_SECONDS = 3.0  # most clients round Retry-After to whole seconds, and the network takes time
_MOST = 10_000  # different requests that have promises at once
_MOST_ALIKE = 8  # promises for equal requests
_CLOCK_SECONDS = 0.001  # rounding error of a time in milliseconds


@dataclass(frozen=True, slots=True)
class _Promise:
    at: float
    amount: float


class Promises:
    """Promises to refused requests: a request that comes again at its promised time is accepted.

    A promise is for one request, identified by its content: equal prompts with equal limits are the same request. It
    expires a few seconds after its time. Without promises, new requests would take the capacity that a refused client
    waits for, and its Retry-After would be a guess.
    """

    def __init__(self) -> None:
        self._by_ticket: dict[int, list[_Promise]] = {}
        self._reserved = 0.0
        self._next_expiry = 0.0

    def reserved(self, now: float) -> float:
        """The amount promised to clients that may still come."""
        if now >= self._next_expiry:
            self._forget(now)
            self._next_expiry = now + 0.5
        return self._reserved

    def redeem(self, request: GenerationRequest, now: float) -> bool:
        """Whether the request was promised this time or an earlier one; uses the promise up."""
        key = ticket(request)
        promises = self._by_ticket.get(key, [])
        while promises and promises[0].at <= now + _CLOCK_SECONDS:
            promise = promises.pop(0)
            self._drop(key, promise)
            if promise.at + GRACE_SECONDS >= now:
                return True
        return False

    def place(self, request: GenerationRequest, *, now: float, seconds: float, amount: float) -> float:
        """Promise a time to the request; returns the seconds until then.

        Several clients may send equal requests, so each refusal gets its own promise, up to `_MOST_ALIKE`. After that
        the last one is repeated.
        """
        known = self._by_ticket.get(ticket(request), [])
        if len(known) >= _MOST_ALIKE and known[-1].at > now:
            return known[-1].at - now
        if seconds > LONGEST_SECONDS or len(self._by_ticket) >= _MOST:
            return LONGEST_SECONDS  # too far away for a promise
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
            self._reserved = 0.0  # no rounding errors remain


def _time(promise: _Promise) -> float:
    return promise.at


def ticket(request: GenerationRequest) -> int:
    """A number that is equal for requests with equal content."""
    return hash((request.tenant, request.prompt_token_ids, request.stop.max_new_tokens, request.n))


MINUTE = 60.0


class TokenBucket:
    """A token bucket: a rate per minute that accumulates for one minute at most; full at first, may go into debt."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._most = per_minute
        self._level = per_minute
        self._at = now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available; more than a minute's rate needs a full bucket."""
        self._fill(now)
        return max(0.0, (min(amount, self._most) - self._level) * MINUTE / self._most)

    def seconds(self, amount: float) -> float:
        """Seconds in which `amount` accumulates."""
        return amount * MINUTE / self._most

    def take(self, amount: float, now: float) -> None:
        """Use `amount` up."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + max(now - self._at, 0.0) * self._most / MINUTE)
        self._at = now

"""Keeps tenants to their rates and quotas: what is over them is refused with the time at which it is not.

Owns each tenant's buckets and its count of unfinished sequences. Promises: who comes again at the time it was told is
taken; nothing is used up by what is refused. Must not know: keys, the engine, how requests run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from quire_engine.types import GenerationRequest, TenantStats
from quire_server.engine.promises import Promises
from quire_server.engine.tenants import Tenant
from quire_server.engine.token_bucket import TokenBucket
from quire_server.errors import QueueFull
from quire_server.metrics.tenant_metrics import TenantMetrics

_WINDOW_SECONDS = 30.0
_FIRST_GUESS_SECONDS = 3.0  # in which one sequence of the tenant ends, while none has


class TenantGate:
    """In front of the queue, for tenants of the operator's list."""

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
        while self._ends and self._ends[0][0] < now - _WINDOW_SECONDS:
            self._ends.popleft()
        if not self._ends:
            return sequences * _FIRST_GUESS_SECONDS
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

"""The replicas together: fairness of tenants over all of them, and the number of replicas wanted.

Promises: nothing here sees a clock; times are given. Must not know: sockets, clocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from quire_engine.contract.types import TenantStats
from quire_engine.routing.views import ReplicaView


class TenantService:
    """Each tenant's service by replica, so that a replica's fair queue can count what others gave.

    A fair queue orders tenants by the service here and elsewhere. Two tenants that always wait so stay as near to each
    other as on one engine, plus one step's service of each replica and what is in flight until the stats come.
    """

    def __init__(self) -> None:
        self._by_replica: dict[str, dict[str, float]] = {}
        self._of_gone: dict[str, float] = {}  # what lost replicas had given
        self._totals: dict[str, float] = {}

    def observe(self, name: str, stats: Iterable[TenantStats]) -> None:
        """The tenants in a replica's stats. Totals of an engine that has restarted begin at 0 again."""
        known = self._by_replica.setdefault(name, {})
        for tenant in stats:
            before, service = known.get(tenant.tenant, 0.0), tenant.total_service
            if service < before:
                self._of_gone[tenant.tenant] = self._of_gone.get(tenant.tenant, 0.0) + before
                self._totals[tenant.tenant] = self._totals.get(tenant.tenant, 0.0) + service
            else:
                self._totals[tenant.tenant] = self._totals.get(tenant.tenant, 0.0) + service - before
            known[tenant.tenant] = service

    def remove(self, name: str) -> None:
        """A replica is gone; what it gave stays given."""
        for tenant, service in self._by_replica.pop(name, {}).items():
            self._of_gone[tenant] = self._of_gone.get(tenant, 0.0) + service

    def elsewhere(self, name: str, tenant: str) -> float:
        """The tenant's service by all replicas but this one's running engine."""
        return self._totals.get(tenant, 0.0) - self._by_replica.get(name, {}).get(tenant, 0.0)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The replicas that one front asks for. Rounded up is only the sum of fronts that share replicas."""

    work: float  # busy seconds that requests offer a second, over the share of its seconds that a replica may be busy
    at_least: int  # one more than serve now, where first tokens are late; take the most of fronts, not their sum

    @property
    def count(self) -> int:
        """The number of replicas wanted where there is no other front."""
        return wanted_together([self])


def wanted_together(fronts: Iterable[Wanted]) -> int:
    """The replicas that fronts want together, which share them."""
    fronts = list(fronts)
    by_work = math.ceil(sum(each.work for each in fronts) - 1e-9)
    return max(by_work, max((each.at_least for each in fronts), default=0))


class WantedReplicas:
    """The autoscaling signal: busy seconds of the cost model offered per second / 0.75.

    Up at once where the predicted TTFT's p95 has been above the target for 10 seconds; down after 5 minutes.
    """

    share = 0.75  # of a replica's seconds that are to be busy
    window = 60.0  # seconds over which the offered work is counted
    late_seconds = 10.0  # p95 above the target for so long wants one more at once
    down_seconds = 300.0  # fewer are wanted only when fewer were enough for so long

    def __init__(self, *, ttft_target: float = 0.0, least: int = 1, now: float = 0.0) -> None:
        self._target = ttft_target  # seconds; 0: none
        self._least = least
        self._began = now
        self._offered: deque[tuple[float, float]] = deque()  # (time, busy seconds)
        self._sum = 0.0
        self._ttfts: deque[tuple[float, float]] = deque()
        self._late_since: float | None = None
        self._work, self._at_least = _Highest(self.down_seconds), _Highest(self.down_seconds)

    def offer(self, *, busy_seconds: float, predicted_ttft: float, now: float) -> None:
        """A request was routed: what it costs a replica in all, and how long its first token is to take."""
        self._offered.append((now, busy_seconds))
        self._sum += busy_seconds
        self._ttfts.append((now, predicted_ttft))

    def wanted(self, now: float, *, ready: int) -> Wanted:
        """The replicas that are wanted, where `ready` of them serve now."""
        while self._offered and self._offered[0][0] < now - self.window:
            self._sum -= self._offered.popleft()[1]
        seconds = min(max(now - self._began, 1.0), self.window)
        work = max(self._sum, 0.0) / seconds / self.share if self._offered else 0.0
        at_least = max(self._least, ready + 1 if self._is_late(now) else 0)
        return Wanted(self._work.take(now, work), int(self._at_least.take(now, at_least)))

    def _is_late(self, now: float) -> bool:
        while self._ttfts and self._ttfts[0][0] < now - self.late_seconds:
            self._ttfts.popleft()
        if not self._target or not self._ttfts:
            self._late_since = None
            return False
        ordered = sorted(ttft for _, ttft in self._ttfts)
        if ordered[int(0.95 * (len(ordered) - 1))] <= self._target:
            self._late_since = None
            return False
        if self._late_since is None:
            self._late_since = now
        return now - self._late_since >= self.late_seconds


class _Highest:
    """The highest of the values of the last seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._falling: deque[tuple[float, float]] = deque()  # (time, value), falling

    def take(self, now: float, value: float) -> float:
        """Take in one more; returns the highest."""
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now, value))
        while self._falling[0][0] < now - self._seconds:
            self._falling.popleft()
        return self._falling[0][1]


def request_seconds(view: ReplicaView, *, prompt_tokens: int, output_tokens: int) -> float:
    """Busy seconds that a request costs a replica that is as full as this one now: its part of the steps it is in."""
    cost, budget = view.cost, view.limits.max_num_batched_tokens
    decodes = max(view.decodes, 1)
    of_decode = cost.decode_seconds(decodes, view.context) / decodes
    return prompt_tokens * cost.prompt_seconds(budget) / budget + output_tokens * of_decode

"""The real scheduler under tenants' load, with steps that take what a linear model of a machine says.

Promises: same arrivals, same history. Must not know: tokens' values, which policy is tried.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import GenerationRequest, SamplingParams, ServiceClass, StopParams, TokenOutput
from quire_engine.scheduling.scheduler import Scheduler

PROMPT_COST, OUTPUT_COST = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    at: float
    tenant: str
    prompt: int
    output: int
    weight: float = 1.0
    service_class: ServiceClass = "interactive"
    deadline: float | None = None
    max_running: int = 0


@dataclass(slots=True)
class Machine:
    """Seconds of a step: so much in any case, and for each prompt token and each decode."""

    fixed: float = 0.02
    prompt_token: float = 0.0003
    decode: float = 0.0005

    def seconds(self, batch: Batch) -> float:
        return self.fixed + self.prompt_token * (batch.num_tokens - batch.num_decodes) + self.decode * batch.num_decodes


@dataclass(slots=True)
class History:
    """What came of it."""

    ttft: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by tenant, in order of the token
    service: list[tuple[float, str, int]] = field(default_factory=list)  # when, who, how much
    waits: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))  # changes of the queue
    finished: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    expired: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    preemptions: int = 0
    seconds: float = 0.0
    steps: int = 0

    def total(self, tenant: str, since: float = 0.0, until: float = float("inf")) -> int:
        return sum(amount for at, who, amount in self.service if who == tenant and since <= at < until)

    def p95(self, tenant: str) -> float:
        values = sorted(self.ttft[tenant])
        return values[min(int(len(values) * 0.95), len(values) - 1)]

    def largest_gap(self, one: str, other: str) -> int:
        """The largest difference of what the two got in any interval in which both had requests waiting."""
        backlogged = {one: False, other: False}
        changes = [(at, 0, who, count) for who in (one, other) for at, count in self.waits[who]]
        events = changes + [(at, 1, who, amount) for at, who, amount in self.service if who in backlogged]
        worst = difference = low = high = 0
        for _, kind, who, value in sorted(events):
            if kind == 0:
                backlogged[who] = value > 0
                if not all(backlogged.values()):
                    difference = low = high = 0
                continue
            if all(backlogged.values()):
                difference += value if who == one else -value
                low, high = min(low, difference), max(high, difference)
                worst = max(worst, high - low)
        return worst


def request_of(name: str, arrival: Arrival) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=(hash(name) % 50_000, *range(arrival.prompt - 1)),  # no two share a block
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=arrival.output),
        arrival_time=arrival.at,
        tenant=arrival.tenant,
        weight=arrival.weight,
        service_class=arrival.service_class,
        deadline=arrival.deadline,
        max_running=arrival.max_running,
    )


def simulate(
    config: SchedulerConfig, arrivals: Iterable[Arrival], *, until: float = float("inf"), machine: Machine | None = None
) -> History:
    """Run the arrivals, to their end or until a time."""
    machine = machine or Machine()
    scheduler, history, now = Scheduler(config), History(), 0.0
    pending = [(arrival.at, number, arrival) for number, arrival in enumerate(arrivals)]
    heapq.heapify(pending)
    known: dict[str, Arrival] = {}
    waiting: dict[str, int] = defaultdict(int)
    prompts: dict[str, int] = defaultdict(int)
    while (pending or scheduler.has_work) and now < until:
        if not scheduler.has_work:
            now = max(now, pending[0][0])
        while pending and pending[0][0] <= now:
            _, number, arrival = heapq.heappop(pending)
            name = f"{arrival.tenant}-{number}"
            known[name] = arrival
            scheduler.add(request_of(name, arrival), now)
        for output in scheduler.expire(now):
            history.expired[known[output.request_id].tenant] += 1
        batch = scheduler.schedule(now)
        if batch is None:
            continue
        for each in scheduler.stats().tenants:
            _note(history.waits[each.tenant], waiting, now, each.tenant, each.waiting)
            history.service.append((now, each.tenant, PROMPT_COST * (each.total_prompt_tokens - prompts[each.tenant])))
            prompts[each.tenant] = each.total_prompt_tokens
        now += machine.seconds(batch)
        history.steps += 1
        for output in scheduler.apply(batch, _results(batch), now):
            _take(history, known, output, now)
    history.preemptions = scheduler.stats().total_preemptions
    history.seconds = now
    return history


def _note(changes: list[tuple[float, int]], last: dict[str, int], now: float, tenant: str, count: int) -> None:
    if (count > 0) != (last[tenant] > 0):
        changes.append((now, count))
    last[tenant] = count


def _take(history: History, known: dict[str, Arrival], output: TokenOutput, now: float) -> None:
    arrival = known[output.request_id]
    history.service.append((now, arrival.tenant, OUTPUT_COST * len(output.token_ids)))
    if output.timing is not None and output.finish is None:
        history.ttft[arrival.tenant].append(now - arrival.at)
    if output.finish is not None:
        history.finished[arrival.tenant] += 1


def _results(batch: Batch) -> StepResult:
    result = StepResult()
    for item in batch.items:
        if item.wants_sample:
            result.samples[item.sequence_id] = (SampledToken(token_id=7),)
    return result

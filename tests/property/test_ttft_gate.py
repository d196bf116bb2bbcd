"""Shedding by the predicted time to the first token, in front of a machine that computes prompts at a steady rate."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from unittest.mock import Mock

import pytest

from quire_engine.contract.types import (
    EngineStats,
    GenerationRequest,
    RequestTiming,
    SamplingParams,
    StepOutput,
    StopParams,
    TokenOutput,
)
from quire_server.engine.admission import Promises, QueueLimits, TenantGate, TtftGate
from quire_server.engine.budgets import LONGEST_SECONDS
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.engine.tenants import Tenant
from quire_server.errors import QueueFull
from support.fakes import make_plan

TARGET = 2.0
STEP_TOKENS = 512
TIMING = RequestTiming(queue_seconds=0.0, kv_wait_seconds=0.0, prefill_seconds=0.0, num_preemptions=0)


@dataclass(slots=True)
class World:
    """The real client; prompts are computed in the order of their arrival, a request ends with its first token."""

    rate: float  # prompt tokens a second
    target: float | None = TARGET
    tenant: Tenant | None = None
    now: float = 50.0
    ttft: list[float] = field(default_factory=list)
    refusals: int = 0
    given_up: int = 0
    told: dict[str, float] = field(default_factory=dict)  # when a refused request may come again
    broken: list[str] = field(default_factory=list)  # refused at the time they were told

    def run(self, arrivals: list[tuple[float, str, int]], *, retries: int) -> None:
        client = EngineClient(
            Mock(),
            plan=make_plan(),
            limits=QueueLimits(max_sequences=100_000),
            metrics=Mock(),
            tenants=TenantGate([self.tenant], Mock(), self.now) if self.tenant else None,
            ttft=None if self.target is None else TtftGate(self.target, step_tokens=STEP_TOKENS),
            clock=lambda: self.now,
        )
        numbers = count()
        events = [(at, next(numbers), name, tokens, retries) for at, name, tokens in arrivals]
        heapq.heapify(events)
        queue: deque[list] = deque()  # name, tokens left, accepted at
        while events or queue:
            if not queue:
                self.now = max(self.now, events[0][0])
            while events and events[0][0] <= self.now:
                _, _, name, tokens, left = heapq.heappop(events)
                wait = self.ask(client, name, tokens)
                if wait is None:
                    queue.append([name, tokens, self.now])
                elif left:
                    heapq.heappush(events, (self.now + wait, next(numbers), name, tokens, left - 1))
                else:
                    self.given_up += 1
            if queue:
                self.step(client, queue)

    def ask(self, client: EngineClient, name: str, tokens: int) -> float | None:
        request = GenerationRequest(
            request_id=f"{name}-{self.now}",
            prompt_token_ids=(int(name[1:]), *([1] * (tokens - 1))),
            sampling=SamplingParams(),
            stop=StopParams(max_new_tokens=1),
            tenant=self.tenant.name if self.tenant else "",
        )
        try:
            client.submit(request, RequestStream(client))
        except QueueFull as refusal:
            self.refusals += 1
            if self.told.pop(name, float("inf")) <= self.now:
                self.broken.append(name)
            wait = int(refusal.headers["retry-after-ms"]) / 1000
            if wait < 58.9:  # further away than that nothing is promised
                self.told[name] = self.now + wait
            return wait
        self.told.pop(name, None)
        return None

    def step(self, client: EngineClient, queue: deque[list]) -> None:
        left, outputs = STEP_TOKENS, []
        while queue and left:
            part = min(queue[0][1], left)
            queue[0][1] -= part
            left -= part
            if queue[0][1] == 0:
                outputs.append(queue.popleft())
        done = STEP_TOKENS - left
        self.now += 0.01 + done / self.rate
        self.ttft += [self.now - accepted for _, _, accepted in outputs]
        names = [
            request_id for request_id in client._streams if request_id.rsplit("-", 1)[0] in {o[0] for o in outputs}
        ]
        ends = tuple(TokenOutput(request_id=each, token_ids=(1,), finish="length", timing=TIMING) for each in names)
        client.on_step(StepOutput(step_id=1, outputs=ends, stats=EngineStats(blocks_total=1, prefill_tokens=done)))

    @property
    def p95(self) -> float:
        return sorted(self.ttft)[int(len(self.ttft) * 0.95)]


def overload(seed: int, factor: float, *, seconds: float = 60.0, rate: float = 2000.0) -> list[tuple[float, str, int]]:
    """Prompts of many lengths, `factor` times as many tokens as can be computed."""
    dice, at, arrivals = random.Random(seed), 50.0, []
    while at < 50.0 + seconds:
        tokens = dice.choice([20, 100, 300, 1000])
        at += dice.expovariate(1.0) * tokens / (factor * rate)
        arrivals.append((at, f"r{len(arrivals)}", tokens))
    return arrivals


async def _run(world: World, arrivals: list[tuple[float, str, int]], retries: int) -> World:
    world.run(arrivals, retries=retries)
    return world


@pytest.mark.parametrize("factor", [1.5, 3.0])
@pytest.mark.parametrize("retries", [0, 2])
def test_under_overload_accepted_requests_keep_the_target(factor: float, retries: int) -> None:
    for seed in range(2):
        world = asyncio.run(_run(World(rate=2000.0), overload(seed, factor), retries))
        assert world.p95 <= TARGET
        assert sum(world.ttft) / len(world.ttft) > TARGET / 8, "too much is refused: hardly anything waits"
        assert world.refusals


def test_without_a_target_the_same_overload_makes_all_wait() -> None:
    world = asyncio.run(_run(World(rate=2000.0, target=None), overload(0, 1.5), 0))
    assert world.p95 > 4 * TARGET


@pytest.mark.parametrize("factor", [1.2, 2.0, 4.0])
def test_who_comes_again_when_it_was_told_is_taken(factor: float) -> None:
    """Whoever else comes in between: each refused request's time is kept for it."""
    for seed in range(2):
        world = asyncio.run(_run(World(rate=2000.0), overload(seed, factor, seconds=20.0), 2))
        assert world.refusals
        assert world.broken == []
        assert world.given_up == 0, "a burst of twenty seconds comes through with one retry"


def test_a_server_with_room_refuses_nothing() -> None:
    world = asyncio.run(_run(World(rate=2000.0), overload(1, 0.25), 0))
    assert world.refusals == 0


@pytest.mark.parametrize(
    "tenant",
    [
        Tenant(name="t", requests_per_minute=120),
        Tenant(name="t", tokens_per_minute=40_000),
        Tenant(name="t", requests_per_minute=100, tokens_per_minute=30_000),
    ],
)
def test_a_tenants_rate_is_kept_and_so_is_the_time_it_is_told(tenant: Tenant) -> None:
    arrivals = overload(2, 0.8, seconds=60.0)
    world = asyncio.run(_run(World(rate=2000.0, target=None, tenant=tenant), arrivals, 3))
    assert world.refusals
    if tenant.requests_per_minute is None or tenant.tokens_per_minute is None:
        assert world.broken == []
    minutes = (world.now - 50.0) / 60
    if tenant.requests_per_minute is not None:
        assert len(world.ttft) <= tenant.requests_per_minute * (minutes + 1) + 1


def test_clients_with_the_same_request_have_a_time_each() -> None:
    promises, wanted = (
        Promises(),
        GenerationRequest(
            request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(), stop=StopParams(max_new_tokens=1)
        ),
    )
    waits = [promises.place(wanted, now=0.0, seconds=seconds, amount=5.0) for seconds in (1.0, 2.0, 3.0)]
    assert (waits, promises.reserved(0.0)) == ([1.0, 2.0, 3.0], 15.0)
    assert [promises.redeem(wanted, now) for now in (0.5, 1.0, 1.5, 2.0, 3.0, 3.0)] == [
        False, True, False, True, True, False,
    ]  # fmt: skip
    assert promises.reserved(4.0) == 0.0


def test_a_promise_that_nobody_comes_for_is_forgotten() -> None:
    promises, wanted = (
        Promises(),
        GenerationRequest(
            request_id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(), stop=StopParams(max_new_tokens=1)
        ),
    )
    promises.place(wanted, now=0.0, seconds=10.0, amount=5.0)
    assert promises.reserved(12.9) == 5.0
    assert promises.reserved(13.6) == 0.0
    assert promises.place(wanted, now=20.0, seconds=60.0, amount=5.0) == LONGEST_SECONDS
    assert promises.reserved(20.0) == 0.0, "too far away to be promised"

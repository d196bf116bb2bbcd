"""Retry-After after 429: bursts of clients that come again when they are told to, twice as the OpenAI SDKs do."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from itertools import count, pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.contract.types import (
    EngineStats,
    GenerationRequest,
    SamplingParams,
    StepOutput,
    StopParams,
    TokenOutput,
)
from quire_server.engine.admission import LEAST_SECONDS, QueueLimits, RetryLine, SeatMeter
from quire_server.engine.budgets import LONGEST_SECONDS
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.errors import QueueFull
from support.fakes import make_plan

SDK_RETRIES = 2
NUM_BURSTS = 60


class World:
    """The real client before an engine of `seats` places, whose sequences take about `service` seconds each."""

    def __init__(self, *, seats: int, queue: int, service: float, seed: int) -> None:
        self.now = 100.0
        self.client = EngineClient(
            Mock(),
            plan=make_plan(max_num_seqs=seats),
            limits=QueueLimits(max_sequences=seats + queue),
            metrics=Mock(),
            clock=lambda: self.now,
        )
        self.served = 0
        self.waits: list[float] = []
        self._service = service
        self._rng = random.Random(seed)
        self._free = seats
        self._queue: deque[str] = deque()
        self._events: list[tuple[float, int, str, int]] = []  # when, order, what, retries left
        self._numbers = count()

    def arrive(self, *, at: float, retries: int = SDK_RETRIES) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), "arrive", retries))

    def run(self) -> None:
        while self._events:
            self.now, number, what, retries = heapq.heappop(self._events)
            if what == "arrive":
                self._arrive(f"r{number}", retries)
            else:
                self._end(what)

    def _arrive(self, name: str, retries: int) -> None:
        request = GenerationRequest(
            request_id=name, prompt_token_ids=(1,), sampling=SamplingParams(), stop=StopParams(max_new_tokens=8)
        )
        try:
            self.client.submit(request, RequestStream(self.client))
        except QueueFull as refusal:
            wait = int(refusal.headers["retry-after-ms"]) / 1000
            self.waits.append(wait)
            if retries:
                self.arrive(at=self.now + wait + self._rng.uniform(0.0, 0.05), retries=retries - 1)
            return
        self._queue.append(name)
        self._fill()

    def _end(self, name: str) -> None:
        self.served += 1
        self._free += 1
        last = TokenOutput(request_id=name, token_ids=(1,), finish="length")
        self.client.on_step(StepOutput(step_id=1, outputs=(last,), stats=EngineStats()))
        self._fill()

    def _fill(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            ends = self.now + self._service * self._rng.uniform(0.7, 1.3)
            heapq.heappush(self._events, (ends, next(self._numbers), self._queue.popleft(), 0))


async def burst(
    *, seats: int, queue: int, service: float, seconds: float, before: int, seed: int
) -> tuple[World, float]:
    """So many too many at once as the seats serve in `seconds`, after `before` single requests and a pause.

    Returns the share of those too many that were served in the end, too.
    """
    world = World(seats=seats, queue=queue, service=service, seed=seed)
    for _ in range(before):
        world.arrive(at=world.now)
        world.run()
    world.now += 20.0 if before else 0.0
    world.served = 0
    too_many = max(int(seats * seconds / service), 1)
    for _ in range(seats + queue + too_many):
        world.arrive(at=world.now)
    world.run()
    return world, (world.served - seats - queue) / too_many


def test_two_retries_carry_most_of_a_burst_through() -> None:
    """Over many servers and bursts. Of a burst of two or three all may be late at once: no rule for each."""
    dice, shares = random.Random(0), []
    for _ in range(NUM_BURSTS):
        seats, service = dice.choice([1, 4, 8, 16]), dice.uniform(0.1, 6.0)
        seconds = min(dice.uniform(0.5, 45.0), 400 * service / seats)  # a burst of a few hundred will do
        world, share = asyncio.run(
            burst(
                seats=seats,
                queue=dice.randint(4, 64),
                service=service,
                seconds=seconds,
                before=dice.choice([0, 3]),
                seed=dice.randrange(1 << 16),
            )
        )
        assert all(LEAST_SECONDS <= wait <= LONGEST_SECONDS + 0.001 for wait in world.waits)
        shares.append(share)
    assert sum(shares) / len(shares) > 0.99
    assert sorted(shares)[len(shares) // 20] > 0.94  # of 19 bursts in 20


def test_nearly_all_of_usual_bursts_come_through() -> None:
    shares = [
        asyncio.run(burst(seats=8, queue=32, service=service, seconds=30.0, before=0, seed=seed))[1]
        for service in (0.5, 1.0, 2.0, 4.0)
        for seed in (1, 2)
    ]
    assert sum(shares) / len(shares) > 0.98


def test_the_same_history_gives_the_same_waits() -> None:
    first, second = (
        asyncio.run(burst(seats=4, queue=8, service=1.0, seconds=20.0, before=3, seed=7))[0] for _ in range(2)
    )
    assert first.waits == second.waits


@given(rate=st.floats(0.01, 100.0), waiting=st.integers(0, 500), size=st.integers(1, 16), refusals=st.integers(2, 500))
def test_refusals_at_one_moment_are_spread_over_the_whole_line(
    rate: float, waiting: int, size: int, refusals: int
) -> None:
    line = RetryLine()
    waits = [line.wait(5.0, sequences=size, waiting=waiting, rate=rate) for _ in range(refusals)]
    assert all(LEAST_SECONDS <= wait <= LONGEST_SECONDS + 1e-9 for wait in waits)
    step = min(size / rate, 4.0)
    for one, next_one in pairwise(waits):
        begins_again = one + step > LONGEST_SECONDS - 1e-9 and next_one == waits[0]
        assert begins_again or next_one - one == pytest.approx(step)


def test_places_pass_with_time() -> None:
    line = RetryLine()
    waits = [line.wait(float(now), sequences=1, waiting=0, rate=1.0) for now in (0, 0, 0, 2, 2, 30)]
    assert waits == [1.0, 2.0, 3.0, 2.0, 3.0, 1.0]


@given(seats=st.integers(1, 64), service=st.floats(0.05, 5.0), idle=st.floats(0.0, 25.0))
def test_a_server_that_was_idle_is_not_slow(seats: int, service: float, idle: float) -> None:
    meter, now = SeatMeter(seats), 0.0
    for _ in range(3):
        meter.observe(now, sequences=1)
        now += service
        meter.observe(now, sequences=0, ended=1)
        now += idle / 3
    if now - service < 30.0:
        assert meter.rate(now) == pytest.approx(seats / service)
    assert meter.rate(now + 31.0) == pytest.approx(seats / 3)  # nothing is known any more


def test_full_seats_give_the_rate_at_which_they_come_free() -> None:
    meter = SeatMeter(4)
    for step in range(400):  # one ends each half second, after two seconds in its seat
        meter.observe(step / 2, sequences=30, ended=int(step > 4))
    assert meter.rate(200.0) == pytest.approx(2.0, rel=0.1)


def test_nothing_that_ends_slows_the_line_down() -> None:
    meter = SeatMeter(4)
    meter.observe(0.0, sequences=30)
    assert [meter.rate(now) for now in (0.0, 1.0, 10.0)] == [4 / 3, 4 / 3, 0.2]


def test_the_first_end_of_many_that_began_together_speaks_for_all() -> None:
    meter = SeatMeter(4)
    meter.observe(0.0, sequences=30)
    meter.observe(8.0, sequences=29, ended=1)
    assert meter.rate(8.0) == pytest.approx(4 / 8)

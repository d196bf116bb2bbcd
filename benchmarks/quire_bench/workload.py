"""The load that is sent: load points, and requests with prompts of exact lengths in token ids.

Promises: the same seed, point and round give the same requests, to every server; two rounds share no prompt, so that no
prefix cache answers for an earlier round. Must not know: HTTP, clocks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Literal

from quire_bench.traces import TraceRow

Mode = Literal["concurrency", "rate", "trace"]

OPEN_LOOP_SECONDS = 30.0  # of arrivals, when neither requests nor seconds are bounded
_LEAST_REQUESTS = 8
_ROUNDS_OF_REQUESTS = 4  # a closed loop sends so many per stream when nothing bounds it
_LONG_TAILED = "log:"
_SPECIAL_IDS = 100  # most vocabularies begin with control tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A length in tokens, drawn from low to high, both included.

    Evenly, or, with a long tail, its logarithm evenly: as many lengths from 8 to 16 as from 512 to 1,024, which is how
    the lengths of answers in recorded traffic look.
    """

    low: int
    high: int
    is_long_tailed: bool = False

    @classmethod
    def parse(cls, text: str) -> Span:
        """`128`, `64-256` or `log:8-1024`. ValueError otherwise."""
        lengths = text.removeprefix(_LONG_TAILED)
        low, dash, high = lengths.partition("-")
        span = cls(low=int(low), high=int(high if dash else low), is_long_tailed=lengths != text)
        if not 1 <= span.low <= span.high:
            raise ValueError(text)
        return span

    def draw(self, rng: random.Random) -> int:
        """Return a length in tokens."""
        if not self.is_long_tailed:
            return rng.randint(self.low, self.high)
        return min(self.high, int(self.low * ((self.high + 1) / self.low) ** rng.random()))

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{_LONG_TAILED if self.is_long_tailed else ''}{self.low}-{self.high}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """`value`: streams at once, requests per second, or the speed-up of a trace."""

    mode: Mode
    value: float

    def __str__(self) -> str:
        return {"concurrency": "c={:g}", "rate": "{:g} req/s", "trace": "trace x{:g}"}[self.mode].format(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The requests of a benchmark. Lengths in tokens; `prefix` of them are shared by all requests of a round."""

    input: Span
    output: Span
    prefix: int = 0
    vocab: int = 1000  # ids are below this
    seed: int = 0
    requests: int | None = None  # per point and round
    seconds: float | None = None  # no request starts later
    trace: tuple[TraceRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: greedy, ended by its length only."""

    prompt: Sequence[int]
    output_tokens: int
    due: float = 0.0  # seconds after the start; used by open loops


def jobs(workload: Workload, point: LoadPoint, round_number: int) -> Iterator[Job]:
    """The requests of one point in one round. Endless if only time bounds a closed loop."""
    name = f"{workload.seed}/{round_number}"
    if point.mode == "trace":
        made = _traced(workload, point.value, name)
        return made if workload.requests is None else islice(made, workload.requests)
    made = _random_jobs(workload, point, name)
    count = workload.requests
    if count is None and workload.seconds is None:
        count = _default_count(point)
    return made if count is None else islice(made, count)


def warm_up(workload: Workload, count: int) -> list[Job]:
    """A few short requests that share nothing with those that are measured."""
    rng = random.Random(f"{workload.seed}/warm-up")
    lengths = [min(64, workload.input.draw(rng)) for _ in range(count)]
    return [Job(prompt=_ids(rng, workload.vocab, length), output_tokens=8) for length in lengths]


def _default_count(point: LoadPoint) -> int:
    if point.mode == "rate":
        return max(_LEAST_REQUESTS, round(point.value * OPEN_LOOP_SECONDS))
    return max(_LEAST_REQUESTS, _ROUNDS_OF_REQUESTS * int(point.value))


def _random_jobs(workload: Workload, point: LoadPoint, name: str) -> Iterator[Job]:
    prefix = _ids(random.Random(f"{name}/prefix"), workload.vocab, workload.prefix)
    rng = random.Random(f"{name}/{point}")
    due = 0.0
    while True:
        if point.mode == "rate":
            due += rng.expovariate(point.value)
            if workload.seconds is not None and due > workload.seconds:
                return
        prompt = prefix + _ids(rng, workload.vocab, workload.input.draw(rng))
        yield Job(prompt=prompt, output_tokens=workload.output.draw(rng), due=due)


def _traced(workload: Workload, speed: float, name: str) -> Iterator[Job]:
    @lru_cache(maxsize=4096)
    def block(number: int, length: int) -> list[int]:
        return _ids(random.Random(f"{name}/block/{number}"), workload.vocab, length)

    rng = random.Random(f"{name}/trace")
    for row in workload.trace:
        due = row.at / speed
        if workload.seconds is not None and due > workload.seconds:
            return
        prompt: list[int] = []
        for number in row.blocks:
            prompt += block(number, row.block_tokens)
        del prompt[row.input_tokens :]
        prompt += _ids(rng, workload.vocab, row.input_tokens - len(prompt))
        yield Job(prompt=prompt, output_tokens=row.output_tokens, due=due)


def _ids(rng: random.Random, vocab: int, count: int) -> list[int]:
    return rng.choices(range(min(_SPECIAL_IDS, vocab // 2), vocab), k=count)

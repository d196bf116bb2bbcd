"""Shares of tenants that together want more than there is: services, and the largest gap between two of them.

Promises: service is counted as it is given, step by step: a computed prompt token once, an output token twice, what a
preemption makes compute again not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations

from quire_bench.traces import TraceRow
from quire_engine.contract.batch import Batch
from quire_lab.simulation.requests import number_of
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate

_OUTPUT_WEIGHT = 2


@dataclass(slots=True)
class _Pair:
    """How far two tenants' services have drifted apart since both have had requests waiting."""

    difference: float = 0.0
    low: float = 0.0
    high: float = 0.0
    worst: float = 0.0

    def step(self, drift: float, *, both_wait: bool) -> None:
        if not both_wait:
            self.difference = self.low = self.high = 0.0
            return
        self.difference += drift
        self.low, self.high = min(self.low, self.difference), max(self.high, self.difference)
        self.worst = max(self.worst, self.high - self.low)


@dataclass(slots=True)
class Shares:
    """The service that tenants got until the last arrival, and the largest gap while both of a pair waited."""

    rows: Sequence[TraceRow]
    service: dict[str, float] = field(default_factory=dict)
    _pairs: dict[tuple[str, str], _Pair] = field(default_factory=dict)
    _waiting: dict[str, int] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)
    _computed: dict[int, int] = field(default_factory=dict)  # tokens: what is computed again is no service
    _arrived: int = 0

    def __post_init__(self) -> None:
        names = sorted({row.tenant for row in self.rows})
        self.service = dict.fromkeys(names, 0.0)
        self._waiting = dict.fromkeys(names, 0)
        self._pairs = {pair: _Pair() for pair in combinations(names, 2)}

    @property
    def largest_gap(self) -> float:
        return max((pair.worst for pair in self._pairs.values()), default=0.0)

    def watch(self, batch: Batch, began: float, ended: float) -> None:
        """One step."""
        del ended
        if began > self.rows[-1].at:
            return
        while self._arrived < len(self.rows) and self.rows[self._arrived].at <= began:
            self._waiting[self.rows[self._arrived].tenant] += 1
            self._arrived += 1
        given = dict.fromkeys(self.service, 0.0)
        for item in batch.items:
            number = number_of(item.prompt_token_ids)
            row = self.rows[number]
            if number not in self._started:
                self._started.add(number)
                self._waiting[row.tenant] -= 1
            known = max(item.start, self._computed.get(number, 0))
            prompt = max(0, min(item.end, item.num_prompt_tokens) - known)
            self._computed[number] = max(known, item.end)
            given[row.tenant] += (prompt + _OUTPUT_WEIGHT * item.wants_sample) / row.weight
            self.service[row.tenant] += prompt + _OUTPUT_WEIGHT * item.wants_sample
        for (one, other), pair in self._pairs.items():
            both_wait = self._waiting[one] > 0 and self._waiting[other] > 0
            pair.step(given[one] - given[other], both_wait=both_wait)


def shares(setup: Setup, rows: Sequence[TraceRow]) -> Shares:
    """Simulate a run and return its shares; prompts must not share prefixes."""
    found = Shares(rows)
    simulate(setup, rows, watch=found.watch)
    return found

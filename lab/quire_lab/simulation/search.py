"""Searches the settings with the highest rate within objectives: bisection of rates, successive halving of candidates.

Promises: the same load, seed and base give the same plan; every number in it was simulated on the serving scheduler.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError
from quire_lab.simulation.report import Report, report
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate
from quire_lab.simulation.slo import Slo

Settings = tuple[tuple[str, object], ...]  # (name, value) of the settings that differ between candidates
_COARSE, _FINE = 1.2, 1.04  # final ratio of the lowest missed to the highest met rate
_SLOWEST, _FASTEST = 2.0**-16, 2.0**16  # speeds of a trace that are tried
_KEPT = 3  # one candidate in so many survives a round
_GROWTH = 3  # and is tried on so many times the requests
_FEWEST_REQUESTS = 40
_BETTER = 1.02  # factor by which a neighbour must be better to replace the best
_WINDOWS = 3
_GROWING = 0.1  # share of the later requests that may be left in a steady backlog
BACKLOG = "a backlog that grows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """The highest rate at which a candidate meets all objectives."""

    settings: Settings
    rate: float  # requests per second; 0: at none
    missed_at: float  # the lowest rate at which it misses one
    binding: str  # the objective that it misses there
    measured: float  # and its measured value
    at_rate: Report | None  # the report at `rate`


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """One value of one setting instead of the chosen one."""

    name: str
    value: object
    chosen: object
    found: Sustained


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The best settings, with the evidence."""

    best: Sustained
    low: float  # rates of the best over parts of the load
    high: float
    base: Sustained  # the settings that the search began with
    runner_up: Sustained | None
    rejected: tuple[Rejected, ...]
    candidates: int
    simulations: int
    requests: int  # requests of the load
    seconds: float  # duration of the load at the best rate


class Search:
    """One search over one load."""

    def __init__(
        self,
        base: Setup,
        rows: Sequence[TraceRow],
        slo: Slo,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        if len(rows) < 2 or rows[-1].at <= rows[0].at:
            raise ConfigError("a load to plan for needs requests at two times at least")
        self._base = base
        self._rows = rows
        self._slo = slo
        self._tell = tell
        self.simulations = 0

    def run(self, grid: Mapping[str, Sequence[object]], *, candidates: int, seed: int = 0) -> Plan:
        """Try at most `candidates` combinations of the grid's values. Raises ConfigError if no objective can be met."""
        own = tuple((name, self._base.settings()[name]) for name in grid)
        base = self.sustained(own, self._rows, _FINE)
        self._tell(f"as it is: {base.rate:.4g} requests/s, then {base.binding}")
        survivors = self._survivors(grid, own, candidates=candidates, seed=seed, guess=base.rate)
        finals = sorted((self.sustained(one, self._rows, _FINE, base.rate) for one in survivors), key=_by_rate)
        best = max([*finals, base], key=lambda one: one.rate)
        if best.rate == 0:
            raise ConfigError(
                f"no candidate meets {self._slo} at any rate: {base.binding} is missed even by requests alone;"
                " relax it, or take a faster machine or a smaller model"
            )
        best, rejected = self._neighbours(best, grid)
        others = [one for one in (*finals, base) if one.settings != best.settings]
        low, high = self._spread(best)
        return Plan(
            best=best,
            low=low,
            high=high,
            base=base,
            runner_up=max(others, key=lambda one: one.rate, default=None),
            rejected=rejected,
            candidates=candidates,
            simulations=self.simulations,
            requests=len(self._rows),
            seconds=len(self._rows) / best.rate,
        )

    def sustained(
        self, settings: Settings, rows: Sequence[TraceRow], precision: float, guess: float = 0.0
    ) -> Sustained:
        """Bisect the rate, starting from a guess."""
        asked = self._base.with_settings(settings)
        natural = (len(rows) - 1) / (rows[-1].at - rows[0].at)
        speed = (guess or natural) / natural
        met: float | None = None
        missed: float | None = None
        at_rate: Report | None = None
        binding, measured = "", 0.0
        while met is None or missed is None or missed / met > precision:
            found = self._simulate(asked, rows, speed)
            misses = {**{f"refused by {name}": float(count) for name, count in found.refused.items()}, **found.misses}
            if not is_steady(found):
                misses[BACKLOG] = float(found.backlog_end - found.backlog_early)
            if misses:
                missed = speed
                binding = max(misses, key=lambda name: self._excess(name, misses[name]))
                measured = misses[binding]
            else:
                met, at_rate = speed, found
            if (missed or 1.0) < _SLOWEST or (met or 1.0) > _FASTEST:
                break
            if met is None or missed is None:
                speed = speed / 2 if met is None else speed * 2
            else:
                speed = (met * missed) ** 0.5
        return Sustained(
            settings=settings,
            rate=natural * (met or 0.0),
            missed_at=natural * (missed or 0.0),
            binding=binding,
            measured=measured,
            at_rate=at_rate,
        )

    def _simulate(self, asked: Setup, rows: Sequence[TraceRow], speed: float) -> Report:
        self.simulations += 1
        return report(simulate(asked, rows, speed=speed), self._slo)

    def _excess(self, name: str, measured: float) -> float:
        limits = {one.name: one.seconds for one in self._slo.objectives}
        return measured / limits[name] if limits.get(name) else float("inf")

    def _survivors(
        self, grid: Mapping[str, Sequence[object]], own: Settings, *, candidates: int, seed: int, guess: float
    ) -> list[Settings]:
        """Successive halving: all on a few requests, the best third on three times as many, and so on."""
        left = [one for one in _combinations(grid) if one != own and self._is_possible(one)]
        random.Random(seed).shuffle(left)
        left = left[: max(0, candidates - 1)]
        count = max(_FEWEST_REQUESTS, len(self._rows) // _GROWTH**3)
        while len(left) > _KEPT and count < len(self._rows):
            scored = [(self.sustained(one, self._rows[:count], _COARSE, guess).rate, one) for one in left]
            scored.sort(key=lambda pair: -pair[0])
            left = [one for _, one in scored[: -(-len(scored) // _KEPT)]]
            self._tell(f"{len(scored)} candidates on {count} requests: the best does {scored[0][0]:.4g} requests/s")
            count *= _GROWTH
        return left[:_KEPT]

    def _is_possible(self, settings: Settings) -> bool:
        try:
            self._base.with_settings(settings)
        except ConfigError:
            return False
        return True

    def _neighbours(
        self, best: Sustained, grid: Mapping[str, Sequence[object]]
    ) -> tuple[Sustained, tuple[Rejected, ...]]:
        """Every other value of one setting at a time; a better one replaces the best."""
        while True:  # ends, since each round is better by a factor
            rejected: list[Rejected] = []
            for name, value, settings in _changed_by_one(best.settings, grid):
                if self._is_possible(settings):
                    found = self.sustained(settings, self._rows, _FINE, best.rate)
                    chosen = dict(best.settings)[name]
                    rejected.append(Rejected(name=name, value=value, chosen=chosen, found=found))
            better = max((one.found for one in rejected), key=lambda one: one.rate, default=best)
            if better.rate <= best.rate * _BETTER:
                break
            self._tell(f"a neighbour does {better.rate:.4g} requests/s instead of {best.rate:.4g}")
            best = better
        return best, tuple(rejected)

    def _spread(self, best: Sustained) -> tuple[float, float]:
        """Rates over thirds of the load: how much the answer depends on the recorded part."""
        size = len(self._rows) // _WINDOWS
        rates = [best.rate]
        for start in range(0, size * _WINDOWS, max(size, 1)):
            rows = self._rows[start : start + size]
            if len(rows) >= _FEWEST_REQUESTS and rows[-1].at > rows[0].at:
                part = tuple(replace(row, at=row.at - rows[0].at) for row in rows)
                rates.append(self.sustained(best.settings, part, _COARSE, best.rate).rate)
        return min(rates), max(rates)


def is_steady(found: Report) -> bool:
    """Whether the backlog stopped growing after the first quarter of the load, apart from random fluctuation.

    A short load that is sent at once meets objectives at any rate if all of it is served in time; that rate is not
    sustained.
    """
    later = found.requests - found.requests // 4
    by_chance = math.sqrt(found.backlog_early + 1)
    return found.backlog_end - found.backlog_early <= _GROWING * later + by_chance


def _by_rate(found: Sustained) -> float:
    return -found.rate


def _combinations(grid: Mapping[str, Sequence[object]]) -> Iterable[Settings]:
    return (tuple(zip(grid, values, strict=True)) for values in product(*grid.values()))


def _changed_by_one(settings: Settings, grid: Mapping[str, Sequence[object]]) -> Iterable[tuple[str, object, Settings]]:
    for name, value in settings:
        for other in grid[name]:
            if other != value:
                yield name, other, tuple((key, other if key == name else old) for key, old in settings)


def default_grid(base: Setup) -> dict[str, tuple[object, ...]]:
    """Return values around the base: half and twice its limits, and other common ones."""
    limits = base.scheduler.limits
    seqs, budget, chunk = limits.max_num_seqs, limits.max_num_batched_tokens, limits.prefill_chunk

    def values(*wanted: float) -> tuple[object, ...]:
        return tuple(sorted(set(wanted)))

    return {
        "max_num_seqs": values(max(1, seqs // 2), seqs, 2 * seqs),
        "max_num_batched_tokens": values(max(budget // 2, limits.min_chunk + 1), budget, 2 * budget, 4 * budget),
        "prefill_chunk": values(max(limits.min_chunk, chunk // 2), chunk, 2 * chunk),
        "itl_target": values(0.0, 0.05, limits.itl_target, 0.2),
        "scheduling_policy": (limits.scheduling_policy,),
    }

"""Published and recomputed numbers that a simulation is held to: each check prints what was expected and what it got.

Promises: a check computes what it says with the scheduler that serves, or by the cache's own rule; nothing is looked up
that could be computed.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire_bench.traces import TraceRow, read_trace
from quire_engine.contract.batch import Batch
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.cost_model import CostModel
from quire_lab.simulation.lengths import exercise_setup, rows_of
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import simulate
from quire_lab.simulation.static_batching import simulate_static
from quire_lab.studies.fairness import shares


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRate:
    """The hits that a prefix cache would have had over a whole trace, its prompts one after the other.

    `blocks`: the cache's size; None: all that ever were. Least recently used blocks go first, the deepest of a prompt
    before those that it stands on, as in the allocator.
    """

    blocks: int | None
    prompt_tokens: int
    hit_tokens: int
    asked_blocks: int
    hit_blocks: int

    @property
    def tokens(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def of_blocks(self) -> float:
        return self.hit_blocks / max(1, self.asked_blocks)


def hit_rate(rows: Sequence[TraceRow], blocks: int | None = None) -> HitRate:
    """The share of prompt tokens that are in the cache when their request comes; a prefix ends at its first miss."""
    cache: OrderedDict[int, None] = OrderedDict()
    tokens = hits = asked = found = 0
    for row in rows:
        tokens += row.input_tokens
        asked += len(row.blocks)
        matched = 0
        for block in row.blocks:
            if block not in cache:
                break
            matched += 1
        found += matched
        hits += min(matched * row.block_tokens, row.input_tokens)
        _use(cache, reversed(row.blocks), blocks)
    return HitRate(blocks=blocks, prompt_tokens=tokens, hit_tokens=hits, asked_blocks=asked, hit_blocks=found)


def _use(cache: OrderedDict[int, None], used: Iterable[int], limit: int | None) -> None:
    for block in used:
        cache[block] = None
        cache.move_to_end(block)
    while limit is not None and len(cache) > limit:
        cache.popitem(last=False)


_LENGTHS = (32, 128, 64, 256)
_STAGGERED = (0.0, 2.0, 4.0, 6.0)
_CACHE_SIZES = (None, 1_000, 5_000, 10_000, 30_000, 50_000, 100_000)  # blocks of 512 tokens
_MOONCAKE = {
    "conversation": (37.4, 4.5, 11.3, 21.5, 33.2, 36.2, 37.1),
    "synthetic": (65.1, 8.4, 28.4, 43.1, 63.6, 65.1, 65.1),
}
_SHAREGPT_MEANS = (161, 338)  # tokens in and out, as the paper on PagedAttention gives them


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number. `tolerance`: how far they may be apart, in the number's own unit."""

    name: str
    expected: float
    got: float
    tolerance: float = 0.0
    unit: str = ""

    @property
    def ok(self) -> bool:
        return abs(self.got - self.expected) <= self.tolerance


def exercise_at_once() -> list[Check]:
    """Four lengths at once: half of static slots is waste, blocks sum up to 30 and never exceed 16."""
    rows = rows_of(_LENGTHS)
    setup = exercise_setup(rows)
    outcome, static = simulate(setup, rows), simulate_static(setup, rows)
    return [
        Check(name="useful share of static slots", expected=46.875, got=100 * static.efficiency, unit="%"),
        Check(name="useful token slots", expected=480, got=static.useful_steps),
        Check(name="static token slots", expected=1024, got=static.slot_steps),
        Check(name="steps", expected=256, got=outcome.steps),
        Check(name="blocks, each request's at its end, summed", expected=30, got=outcome.cumulative_blocks),
        Check(name="blocks at once, peak", expected=16, got=outcome.peak_blocks),
        Check(name="blocks of static slots", expected=64, got=static.outcome.peak_blocks),
    ]


def exercise_staggered() -> list[Check]:
    """Check the same lengths with arrivals two steps apart."""
    rows = rows_of(_LENGTHS, _STAGGERED)
    outcome = simulate(exercise_setup(rows), rows)
    finish = [one.ended_step for one in outcome.requests]
    checks = [Check(name="steps", expected=262, got=outcome.steps)]
    for length, expected, got in zip(_LENGTHS, (32, 130, 68, 262), finish, strict=True):
        checks.append(Check(name=f"length {length} ends after step", expected=expected, got=got))
    return [
        *checks,
        Check(name="blocks at once, peak", expected=16, got=outcome.peak_blocks),
        Check(name="step of the peak, counted from 0", expected=118, got=outcome.peak_step),
        Check(name="blocks at once, mean", expected=11.30, got=outcome.block_steps / outcome.steps, tolerance=0.01),
    ]


def exercise_jobs() -> list[Check]:
    """Jobs of 10, 50, 100 and 200 tokens leave as they end."""
    lengths = (10, 50, 100, 200)
    rows = rows_of(lengths)
    setup = exercise_setup(rows)
    widths: list[int] = []

    def watch(batch: Batch, began: float, ended: float) -> None:
        del began, ended
        widths.append(len(batch.items))

    outcome, static = simulate(setup, rows, watch=watch), simulate_static(setup, rows)
    checks = [
        Check(name="steps", expected=200, got=outcome.steps),
        Check(name="computed token slots", expected=360, got=outcome.computed_tokens),
        Check(name="sequences in a step, most", expected=4, got=max(widths)),
        Check(name="static token slots", expected=800, got=static.slot_steps),
    ]
    for length, one in zip(lengths, outcome.requests, strict=True):
        checks.append(Check(name=f"length {length} ends after step", expected=length, got=one.ended_step))
    return checks


def prefix_hits(data: Path) -> list[Check]:
    """Hit rates of Mooncake's whole traces, for all cache sizes; `data` has both files."""
    checks = []
    for name, expected in _MOONCAKE.items():
        rows = read_trace(_found(data, f"{name}_trace.jsonl"))
        for blocks, percent in zip(_CACHE_SIZES, expected, strict=True):
            size = "no limit" if blocks is None else f"{blocks:,} blocks"
            got = 100 * hit_rate(rows, blocks).tokens
            checks.append(Check(name=f"{name}, {size}", expected=percent, got=got, tolerance=0.3, unit="%"))
    return checks


def tenants_shares(data: Path) -> list[Check]:
    """Tenants of VTC's benchmark on a pool of 10,000 tokens: gaps in the bound, shares by weight, FCFS by demand."""
    bound = 2 * max(1 * 256, 2 * 10_000)  # 2 max(wp L_in, wq M)
    limits = SchedulerLimits(enable_prefix_caching=False, max_num_batched_tokens=1024, itl_target=0.0)
    cost = CostModel(step=0.03, row=0.0004, context=1e-6, prompt=((1, 0.03), (1024, 0.35)))
    config = SchedulerConfig(num_blocks=625, max_model_len=2048, limits=limits)
    setup = Setup(scheduler=config, cost=cost, max_num_queued_reqs=10_000)
    checks = []
    for name, policy in (("FCFS__overload", "fcfs"), ("VTC__overload", "wfq"), ("WVTC__overload-weighted", "wfq")):
        rows = read_trace(_found(data, f"{name}.csv"))
        if name.startswith("WVTC"):
            rows = tuple(replace(row, weight=1.0 + int(row.tenant)) for row in rows)
        found = shares(setup.with_settings([("scheduling_policy", policy)]), rows)
        weights = {row.tenant: row.weight for row in rows}
        if policy == "wfq":
            half = bound / 2
            checks.append(Check(name=f"{name}: largest gap", expected=half, got=found.largest_gap, tolerance=half))
        for tenant, weight in sorted(weights.items())[1:]:
            ratio = found.service[tenant] / found.service["0"]
            expected = 2.0 if policy == "fcfs" else weight
            checks.append(
                Check(
                    name=f"{name}: tenant {tenant} : tenant 0", expected=expected, got=ratio, tolerance=0.05 * expected
                )
            )
    return checks


def shared_prompts() -> list[Check]:
    """Check what two choices of ShareGPT's mean request save by sharing the prompt, closed form and in blocks."""
    prompt, output = _SHAREGPT_MEANS
    fine, coarse = SchedulerLimits(block_size=1), SchedulerLimits()

    def saved(limits: SchedulerLimits) -> float:
        alone = limits.footprint(num_prompt=prompt, max_new_tokens=output + 1, n=1)
        return 100 * (1 - limits.footprint(num_prompt=prompt, max_new_tokens=output + 1, n=2) / (2 * alone))

    return [
        Check(name="saved, two choices, token by token", expected=16.1, got=saved(fine), tolerance=0.05, unit="%"),
        Check(name="saved, two choices, blocks of 16", expected=16.1, got=saved(coarse), tolerance=1.0, unit="%"),
    ]


def queue_of_one(requests: int = 100_000, loads: Sequence[float] = (0.5, 0.7), seed: int = 1) -> list[Check]:
    """One slot, Poisson arrivals, steps of a second: the mean wait is rho s / 2 (1 - rho), as for M/D/1."""
    limits = SchedulerLimits(enable_prefix_caching=False, max_num_seqs=1, max_bypasses=0)
    config = SchedulerConfig(num_blocks=64, max_model_len=64, limits=limits)
    setup = replace(Setup(), scheduler=config, max_num_queued_reqs=requests)
    checks = []
    for load in loads:
        outcome = simulate(setup, poisson(requests, load, seed=seed))
        wait = sum(one.first_at - one.at - 1.0 for one in outcome.done) / len(outcome.done)
        expected = load / (2 * (1 - load))
        checks.append(
            Check(name=f"mean wait at {load:g}", expected=expected, got=wait, tolerance=0.02 * expected, unit="s")
        )
    return checks


def poisson(requests: int, rate: float, *, input_tokens: int = 1, output_tokens: int = 1, seed: int) -> list[TraceRow]:
    """Equal requests at random times."""
    rng, at, rows = random.Random(f"poisson/{seed}"), 0.0, []
    for _ in range(requests):
        at += rng.expovariate(rate)
        rows.append(TraceRow(at=at, input_tokens=input_tokens, output_tokens=output_tokens))
    return rows


def _found(data: Path, name: str) -> Path:
    found = sorted(data.rglob(name)) if data.is_dir() else []
    if not found:
        raise ConfigError(f"there is no {name} under {data}; --help says where it is published")
    return found[0]


# Name: (what it is, what computes it); those in WITH_DATA take the directory of whole traces.
EXERCISES: dict[str, tuple[str, Callable[[], list[Check]]]] = {
    "s1.3": ("lengths 32, 128, 64 and 256 at once, against static slots", exercise_at_once),
    "s2.2": ("the same lengths, arriving in steps 0, 2, 4 and 6", exercise_staggered),
    "s3.1": ("jobs of 10, 50, 100 and 200 tokens", exercise_jobs),
    "v7": ("memory that two choices share (section 6.3 of PagedAttention)", shared_prompts),
    "v10": ("one slot and Poisson arrivals: the M/D/1 queue", queue_of_one),
}
WITH_DATA: dict[str, tuple[str, Callable[[Path], list[Check]]]] = {
    "v4": ("tenants' shares and gaps by virtual token counters (VTC's artifact)", tenants_shares),
    "v3": ("prefix hits of Mooncake's traces by cache size, and without limit (V2)", prefix_hits),
}

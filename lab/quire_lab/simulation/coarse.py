"""A replica without a scheduler: a queue of prompts, an LRU of blocks, decodes as a rate; for fleets of any size.

Only steps with prompts are taken one by one. Decodes advance by one token in each of them, and between them by as many
as fit. What this leaves out is fitted on two replicas of the real scheduler (`fit`). Must not know: the scheduler.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from itertools import takewhile
from math import log
from zlib import crc32

from quire_bench.traces import TraceRow
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import PrefixChanges
from quire_engine.cost_model import CostModel
from quire_engine.routing.prediction import prompt_tokens_a_step
from quire_engine.routing.views import ReplicaView
from quire_engine.scheduling.account import size_class
from quire_lab.simulation.fleet import (
    BlockNames,
    Fleet,
    FleetOutcome,
    FleetSimulation,
    simulate_steps,
)
from quire_lab.simulation.outcome import Outcome, Served
from quire_lab.simulation.prompt_replicas import FirstToken
from quire_lab.simulation.report import percentile
from quire_lab.simulation.setup import Setup

VIEW_SECONDS = 0.05  # how old a view may be: a replica tells of itself once a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Factors that make a coarse replica as fast, and its cache as large, as the scheduler's; 1: as computed."""

    seconds: float = 1.0  # of a step
    cache: float = 1.0  # tokens of the pool that may be cached


@dataclass(slots=True, eq=False)
class _Prompt:
    served: Served
    blocks: tuple[int, ...]
    expected: int  # tokens that the router expects to be computed
    left: int = 0  # tokens to compute
    done: int = 0  # tokens before them


class CoarseReplica:
    """See the module's header. The order is that of size classes in turn, the fewest tokens left first."""

    def __init__(self, name: str, setup: Setup, believed: CostModel, *, told: SchedulerLimits, fit: Fit) -> None:
        """`told`: the limits that it tells the router, with blocks of the load's own size; one object for all."""
        limits, block_tokens = setup.scheduler.limits, told.block_size
        self._cost, self._fit, self._limits = setup.cost, fit, limits
        self._unit = block_tokens
        self._capacity = setup.scheduler.num_slots * fit.cache
        self.outcome = Outcome(num_blocks=setup.scheduler.num_blocks)
        self._base = ReplicaView(
            name=name,
            cohort="",
            state="ready",
            cost=believed,
            limits=told,
            blocks_total=setup.scheduler.num_slots // block_tokens,
        )
        self._most_queued = setup.max_sequences
        self._now = self._busy = 0.0
        self._steps = 0.0  # of decodes so far, between prompts in parts
        self._waiting: dict[int, list[_Prompt]] = {}  # by size class, in order
        self._service: dict[int, float] = {}  # tokens of each size class that have entered
        self._active: list[_Prompt] = []
        self._ends: list[tuple[float, int, Served, tuple[int, ...]]] = []  # decodes by the step of their last token
        self._context = 0.0  # tokens that the decodes attend to
        self._ahead = self._num_waiting = 0  # prompt tokens as the router expects them; requests
        self._held = 0  # tokens in blocks of live requests that others do not share
        self._cache: OrderedDict[int, int] = OrderedDict()  # tokens of each cached block, the longest unused first
        self._cached = 0  # tokens in all of them
        self._changes: dict[int, int] = {}  # by block: its depth, or -1 where it was forgotten
        self._number = 0  # of the last frame
        self._first_tokens: list[FirstToken] = []

    def send(self, row: TraceRow, number: int, at: float, blocks: tuple[int, ...], hit_blocks: int) -> Served:
        served = Served(row=row, number=number, at=at)
        self.outcome.requests.append(served)
        most = self._capacity / self._fit.cache
        if row.input_tokens + row.output_tokens > most:
            served.refused, served.why = "infeasible", "longer than the pool"
        elif self._num_waiting + len(self._active) + len(self._ends) >= self._most_queued:
            served.refused = "max_num_queued_reqs"
        if served.refused:
            self._first_tokens.append(FirstToken(number=number, at=at))
            return served
        self.advance(at + self._cost.request)
        expected = max(row.input_tokens - hit_blocks * self._unit, 1)
        self._ahead += expected
        self._num_waiting += 1
        size = size_class(expected)
        queue = self._waiting.setdefault(size, [])
        if not queue:  # a class that was idle gets no credit for it
            least = min((self._service[other] for other, ones in self._waiting.items() if ones), default=0.0)
            self._service[size] = max(self._service.get(size, 0.0), least)
        queue.append(_Prompt(served, blocks, expected))
        return served

    def advance(self, until: float) -> None:
        while self._now < until:
            if self._num_waiting:
                self._enter()
            if self._active:
                self._prompt_step()
            elif self._ends:
                self._decode(until)
            else:
                break
        if until < float("inf"):
            self._now = max(self._now, until)

    def view(self, now: float, slowness: float = 1.0) -> ReplicaView:
        free = self._capacity / self._fit.cache - self._held
        return replace(
            self._base,
            prompt_tokens_ahead=self._ahead,
            requests=self._num_waiting + len(self._active) + len(self._ends),
            decodes=len(self._ends),
            context=int(self._context),
            blocks_free=max(int(free) // self._unit, 0),
            blocks_blank=max(int(self._capacity - self._cached) // self._unit, 0),
            step_ends_in=max(self._now - now, 0.0) if self._active or self._ends else 0.0,
            slowness=slowness,
        )

    def first_tokens(self) -> list[FirstToken]:
        found, self._first_tokens = self._first_tokens, []
        return found

    def prefixes(self) -> list[PrefixChanges]:
        if not self._changes:
            return []
        changes, self._changes = self._changes, {}
        self._number += 1
        registered = {name: depth for name, depth in changes.items() if depth >= 0}
        forgotten = tuple([name for name, depth in changes.items() if depth < 0])
        frame = PrefixChanges(
            number=self._number,
            registered=tuple(registered),
            depths=tuple(registered.values()),
            forgotten=forgotten,
        )
        return [frame]

    def finish(self) -> Outcome:
        self.outcome.seconds, self.outcome.busy_seconds = self._now, self._busy
        return self.outcome

    def _enter(self) -> None:
        """Prompts enter while seats, memory and the number of prompts under way allow it."""
        limits = self._limits
        blocked: set[int] = set()
        while len(self._active) + len(self._ends) < limits.max_num_seqs:
            sizes = [size for size, queue in self._waiting.items() if queue and size not in blocked]
            if not sizes:
                return
            size = min(sizes, key=self._service.__getitem__)
            own = sum(size_class(one.expected) == size for one in self._active)
            queue = self._waiting[size]
            row = queue[0].served.row
            is_full = self._held + row.input_tokens + row.output_tokens > self._capacity / self._fit.cache
            if own >= limits.max_num_partial_prefills or (is_full and (self._active or self._ends)):
                blocked.add(size)
                continue
            self._begin(queue.pop(0), size)

    def _begin(self, prompt: _Prompt, size: int) -> None:
        row = prompt.served.row
        hit = self._unit * sum(1 for _ in takewhile(self._cache.__contains__, prompt.blocks))
        prompt.done = min(hit, row.input_tokens - 1)
        prompt.left = row.input_tokens - prompt.done
        prompt.served.cached_tokens = prompt.done
        prompt.served.queue_seconds = self._now - prompt.served.at
        for name in prompt.blocks[: hit // self._unit]:
            self._cache.move_to_end(name)
        self._num_waiting -= 1
        self._ahead += prompt.left - prompt.expected
        self._service[size] += prompt.left
        self._held += prompt.left + row.output_tokens
        self._active.append(prompt)

    def _prompt_step(self) -> None:
        decodes, cost = len(self._ends), self._cost
        budget = prompt_tokens_a_step(replace(self._base, cost=cost, decodes=decodes))
        tokens = before = 0
        ended = []
        for prompt in sorted(self._active, key=lambda one: one.left) if len(self._active) > 1 else self._active:
            chunk = min(prompt.left, budget - tokens, self._limits.prefill_chunk)
            if chunk <= 0:
                break
            before += chunk * prompt.done
            prompt.done += chunk
            prompt.left -= chunk
            tokens += chunk
            if not prompt.left:
                ended.append(prompt)
        seconds = cost.prompt_seconds(tokens + decodes) + cost.context * self._context + cost.chunk_context * before
        self._ahead -= tokens
        self._pass(seconds * self._fit.seconds, 1.0)
        self.outcome.computed_tokens += tokens
        for prompt in ended:
            self._active.remove(prompt)
            self._answer(prompt)

    def _answer(self, prompt: _Prompt) -> None:
        """The prompt is computed: its blocks are cached, and its first token has come."""
        served = prompt.served
        row = served.row
        served.first_at = served.last_at = self._now
        served.num_tokens = 1
        self._first_tokens.append(FirstToken(number=served.number, at=self._now))
        self._keep(prompt.blocks)
        if row.output_tokens <= 1:
            self._end(served, prompt.blocks)
            return
        heappush(self._ends, (self._steps + row.output_tokens - 1, served.number, served, prompt.blocks))
        self._context += row.input_tokens + 1

    def _decode(self, until: float) -> None:
        """Steps of decodes alone, until the first of them ends."""
        seconds = self._cost.decode_seconds(len(self._ends), int(self._context)) * self._fit.seconds
        steps = max(self._ends[0][0] - self._steps, 0.0)
        if self._now + steps * seconds > until:
            steps = (until - self._now) / seconds
            self._pass(until - self._now, steps)
            self._now = until
        else:
            self._pass(steps * seconds, steps)

    def _pass(self, seconds: float, steps: float) -> None:
        self._now += seconds
        self._busy += seconds
        self._steps += steps
        self._context += steps * len(self._ends)
        self.outcome.decode_tokens += round(steps * len(self._ends))
        while self._ends and self._ends[0][0] <= self._steps + 1e-9:
            _, _, served, blocks = heappop(self._ends)
            self._context -= served.row.input_tokens + served.row.output_tokens
            served.num_tokens = served.row.output_tokens
            served.last_at = self._now
            self._end(served, blocks)
        if not self._ends:
            self._context = 0.0

    def _end(self, served: Served, blocks: tuple[int, ...]) -> None:
        """End a request: its blocks may be reused; they are cached until then, the last used the longest."""
        row = served.row
        self._held -= row.input_tokens - served.cached_tokens + row.output_tokens
        size = self._limits.block_size
        own = row.input_tokens - len(blocks) * self._unit + row.output_tokens
        self._cache[-1 - served.number] = rounded = -(-own // size) * size
        self._cached += rounded
        self._keep(blocks)

    def _keep(self, blocks: tuple[int, ...]) -> None:
        """Cache these blocks, the first the longest; the longest unused make room."""
        cache, changes = self._cache, self._changes
        for depth in range(len(blocks) - 1, -1, -1):
            name = blocks[depth]
            if name in cache:
                cache.move_to_end(name)
                continue
            cache[name] = self._unit
            self._cached += self._unit
            if changes.pop(name, depth) >= 0:
                changes[name] = depth
        while self._cached > self._capacity:
            name, tokens = cache.popitem(last=False)
            self._cached -= tokens
            if name > 0 and changes.pop(name, -1) < 0:
                changes[name] = -1


def simulate_coarsely(fleet: Fleet, rows: Sequence[TraceRow], *, fit: Fit, speed: float = 1.0) -> FleetOutcome:
    """A fleet of coarse replicas. Raises ConfigError."""
    if fleet.for_prompts:
        raise ConfigError("replicas for prompts are simulated step by step; use the step level")
    limits = fleet.replica.scheduler.limits
    unit = max((row.block_tokens for row in rows), default=0) or limits.block_size
    make = partial(CoarseReplica, told=replace(limits, block_size=unit), fit=fit)
    every = VIEW_SECONDS if fleet.replicas > _ALWAYS_FRESH else 0.0
    return FleetSimulation(fleet, make, BlockNames(), every=every).run(rows, speed=speed)


_ALWAYS_FRESH = 16  # replicas whose views are all made anew for each request
_FITTED_REPLICAS = 2
_TRIED: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("cache", (1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)),
    ("seconds", (0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)),
    ("cache", (1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5)),
)
_MOST_IN_ONE = 0.1  # share of a load that one group of requests with a common prefix may have
_LEAST_GROUPS = 4  # of the largest size that make a part of the load: of one or none, its size would be chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A fit, and how near two coarse replicas come to two of the scheduler's; ratios, coarse over step."""

    fit: Fit
    requests: int
    p50: float
    p95: float
    hits: float


def fitted(fleet: Fleet, rows: Sequence[TraceRow], *, requests: int = 2000, speed: float = 1.0) -> Fitted:
    """Fit the coarse level to two replicas at step level, on a part of the load that keeps its sessions whole."""
    part = _part(rows, _FITTED_REPLICAS / fleet.replicas)[:requests]
    pair = replace(fleet, replicas=_FITTED_REPLICAS, lose_at=(), slow=1.0, stale=0.0)
    true = _measures(simulate_steps(pair, part, speed=speed))
    ratios: dict[Fit, tuple[float, float, float]] = {}

    def error(one: Fit, name: str) -> float:
        """How far its ratios are from 1: the cache by its hits, the seconds by the times."""
        if one not in ratios:
            found = _measures(simulate_coarsely(pair, part, fit=one, speed=speed))
            p50, p95, hits = [mine / other if other else 1.0 for mine, other in zip(found, true, strict=True)]
            ratios[one] = p50, p95, hits
        p50, p95, hits = [abs(log(max(ratio, 1e-3))) for ratio in ratios[one]]
        return hits if name == "cache" else p50 + p95

    best = Fit()
    for name, values in _TRIED:
        best = min([replace(best, **{name: value}) for value in values], key=lambda one: error(one, name))
    p50, p95, hits = ratios[best]
    return Fitted(fit=best, requests=len(part), p50=p50, p95=p95, hits=hits)


def _part(rows: Sequence[TraceRow], share: float) -> list[TraceRow]:
    """About this share of the load: requests with a common prefix come together or not at all.

    The prefix is as long as it must be for no group of them to be more than a tenth of the load or a quarter of the
    part: a prompt that all share, as that of one system, tells no requests apart.
    """
    if share >= 1:
        return list(rows)
    depth = 1
    while True:
        groups = [
            (row.tenant, row.blocks[:depth] if len(row.blocks) >= depth else number) for number, row in enumerate(rows)
        ]
        largest = Counter(groups).most_common(1)[0][1]
        if largest <= max(min(_MOST_IN_ONE, share / _LEAST_GROUPS) * len(rows), 1) or depth >= _DEEPEST:
            break
        depth += 1
    return [row for row, group in zip(rows, groups, strict=True) if crc32(repr(group).encode()) % 1000 < share * 1000]


_DEEPEST = 64  # blocks of a common prefix that are looked at


def _measures(found: FleetOutcome) -> tuple[float, float, float]:
    """TTFT p50 and p95 in seconds, share of prompt tokens that were cached."""
    done = found.outcome.done
    ttfts = sorted(one.ttft for one in done) or [0.0]
    asked = sum(one.row.input_tokens for one in done)
    return percentile(ttfts, 50), percentile(ttfts, 95), sum(one.cached_tokens for one in done) / max(asked, 1)

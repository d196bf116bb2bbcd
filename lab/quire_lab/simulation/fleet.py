"""A fleet on paper: many simulated replicas under the router that serves, with what may go wrong.

Promises: the same load and fleet give the same outcome, to the bit. A replica is the real scheduler on a cost model
(`StepReplica`) or a queue with an LRU of blocks (`coarse.CoarseReplica`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop
from itertools import pairwise, takewhile
from typing import Protocol

from quire_bench.traces import TraceRow
from quire_engine.contract.block_hashes import prompt_hashes, routed_names
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.roles import CHUNK_FOR_OTHERS
from quire_engine.contract.types import PrefixChanges, TokenOutput
from quire_engine.cost_model import CostModel
from quire_engine.routing.fleet import WantedReplicas, request_seconds
from quire_engine.routing.index import PrefixIndex
from quire_engine.routing.policy import route_policy
from quire_engine.routing.prediction import Slowness
from quire_engine.routing.views import ReplicaView, Route, RouteRequest
from quire_lab.simulation.outcome import Outcome, Served
from quire_lab.simulation.prompt_replicas import FirstToken, PromptReplicas
from quire_lab.simulation.requests import as_request
from quire_lab.simulation.setup import Setup
from quire_lab.simulation.simulator import Simulation

MOST_STEP_REPLICAS = 16  # replicas that are simulated step by step; more take too long
ASK_SECONDS = 5.0  # between two questions for the number of replicas that are wanted
_FREED_SECONDS = 10.0  # over which the rate of freed blocks is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal replicas, the policy that routes to them, and what goes wrong."""

    replica: Setup
    replicas: int
    route: str = "predicted_ttft"
    lose_at: tuple[float, ...] = ()  # seconds at which a replica is lost, the first one first
    silence: float = 2.0  # seconds until a loss is noticed
    slow: float = 1.0  # the last replica takes so many times as long, and does not report it
    stale: float = 0.0  # seconds by which the index lags behind
    wrong_cost: float = 1.0  # the router's cost model is so many times the true one
    ttft_target: float = 0.0  # seconds of p95, for the number of replicas that are wanted; 0: none
    for_prompts: int = 0  # of the replicas: they compute prompts for the others, and answer nothing
    token_seconds: float = 0.0  # of one token's KV blocks on the wire between them

    def check(self) -> None:
        """Raises ConfigError."""
        if self.replicas < 1:
            raise ConfigError(f"replicas is {self.replicas}, must be at least 1")
        if len(self.lose_at) >= self.replicas:
            raise ConfigError(f"{len(self.lose_at)} of {self.replicas} replicas are lost, one must be left")
        if min(self.silence, self.stale, *self.lose_at, 0.0) < 0 or min(self.slow, self.wrong_cost) <= 0:
            raise ConfigError("times of a fleet must be at least 0, factors above 0")
        if self.for_prompts >= self.replicas:
            raise ConfigError(f"{self.for_prompts} of {self.replicas} replicas are for prompts, one must answer")
        if self.for_prompts and (self.lose_at or self.slow != 1.0 or self.stale):
            raise ConfigError("with replicas for prompts none is lost or slow, and no index is stale")


class FleetReplica(Protocol):
    """A simulated replica: `StepReplica` or `coarse.CoarseReplica`."""

    outcome: Outcome

    def advance(self, until: float) -> None:
        """Work until then; the clock may be ahead by the rest of a step."""
        ...

    def view(self, now: float, slowness: float = 1.0) -> ReplicaView:
        """The state that the replica reports to a router, beside what that has seen of it."""
        ...

    def send(self, row: TraceRow, number: int, at: float, blocks: tuple[int, ...], hit_blocks: int) -> Served:
        """A request comes; `hit_blocks`: what the router believes to be cached of its named blocks."""
        ...

    def first_tokens(self) -> list[FirstToken]:
        """First tokens since the last call."""
        ...

    def prefixes(self) -> list[PrefixChanges]:
        """Changes of its cached blocks since the last call."""
        ...

    def finish(self) -> Outcome:
        """The outcome with the counts of the whole run."""
        ...


def times(cost: CostModel, factor: float) -> CostModel:
    """The cost model of a machine that takes `factor` times as long."""
    if factor == 1.0:
        return cost
    numbers = {name: getattr(cost, name) * factor for name in ("step", "row", "context", "chunk_context", "request")}
    return replace(cost, **numbers, prompt=tuple([(tokens, seconds * factor) for tokens, seconds in cost.prompt]))


class StepReplica(Simulation):
    """The real scheduler, whose requests come one by one from a router."""

    def __init__(self, name: str, setup: Setup, believed: CostModel) -> None:
        config = replace(setup.scheduler, tells_prefixes=True)
        super().__init__(replace(setup, scheduler=config))
        self._base = ReplicaView(
            name=name,
            cohort="",
            state="ready",
            cost=believed,
            limits=config.limits,
            blocks_total=config.num_blocks,
        )
        self._unanswered: dict[str, int] = {}  # prompt tokens that the router expects to be computed, by request
        self._first_tokens: list[FirstToken] = []
        self._freed: deque[tuple[float, int]] = deque()

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def chunk(self) -> int:
        """Tokens of a prompt that are computed at a time."""
        return self._base.limits.prefill_chunk

    @property
    def _num_available(self) -> int:
        return self._base.blocks_total - self._scheduler.num_used_blocks

    def computed_tokens(self, number: int) -> int:
        """Return how many tokens of a live request's prompt are computed, the cached ones included."""
        group = self._scheduler.roster.live.get(str(number))
        return 0 if group is None else group.leader.kv.num_computed

    def adopt(self, row: TraceRow, number: int, num_tokens: int) -> None:
        """The blocks of a prompt's first tokens come from elsewhere, as far as there is room."""
        request = as_request(row, number, at=self._now, max_model_len=self._setup.scheduler.max_model_len)
        most = min(num_tokens, row.input_tokens - 1) // self._block_size
        keys = prompt_hashes(request.prompt_token_ids, request.cache_salt, self._block_size, most=most)
        self._scheduler.kept.adopt(request, 0, keys[: self._num_available])

    def send(self, row: TraceRow, number: int, at: float, blocks: tuple[int, ...], hit_blocks: int) -> Served:  # noqa: ARG002
        self.advance(at + self._cost.request)
        self.arrive(row, number, at)
        served = self.outcome.requests[-1]
        if served.refused:
            self._first_tokens.append(FirstToken(number=number, at=at))
        else:
            cached = hit_blocks * self._block_size
            self._unanswered[str(number)] = max(row.input_tokens - cached, 1)
        return served

    def view(self, now: float, slowness: float = 1.0) -> ReplicaView:
        roster, live = self._scheduler.roster, self._scheduler.roster.live
        ahead = 0
        for request_id, expected in self._unanswered.items():
            group = live[request_id]
            ahead += group.pending(group.leader) if group.state == "running" else expected
        decodes = context = 0
        for group in roster.running:
            if group.request.request_id not in self._unanswered:
                decodes += 1
                context += len(group.leader.token_ids)
        while self._freed and self._freed[0][0] < now - _FREED_SECONDS:
            self._freed.popleft()
        return replace(
            self._base,
            prompt_tokens_ahead=ahead,
            requests=len(self._live),
            decodes=decodes,
            context=context,
            blocks_free=self._num_available,
            blocks_blank=self._num_available - self._scheduler.num_cached_blocks,
            blocks_freed_rate=sum(blocks for _, blocks in self._freed) / _FREED_SECONDS,
            step_ends_in=max(self._now - now, 0.0) if self._live else 0.0,
            slowness=slowness,
        )

    def first_tokens(self) -> list[FirstToken]:
        found, self._first_tokens = self._first_tokens, []
        return found

    def prefixes(self) -> list[PrefixChanges]:
        found = []
        while (changes := self._scheduler.take_prefixes()) is not None:
            found.append(changes)
        return found

    def _take(self, output: TokenOutput) -> None:
        if self._unanswered.pop(output.request_id, None) is not None:
            self._first_tokens.append(FirstToken(number=int(output.request_id), at=self._now))
        super()._take(output)

    def _end(self, output: TokenOutput, served: Served) -> None:
        super()._end(output, served)
        blocks = -(-(served.row.input_tokens + served.num_tokens) // self._block_size)
        self._freed.append((self._now, blocks))


@dataclass(slots=True, kw_only=True)
class FleetOutcome:
    """A run of a whole fleet: all requests as if one server had served them, and the router's account."""

    outcome: Outcome
    counts: list[int]  # requests sent to each replica
    moved: int = 0  # streams and requests that went elsewhere after a loss
    ratios: list[float] = field(default_factory=list)  # seen TTFT over the predicted one, of each request
    chosen: list[int] = field(default_factory=list)  # the replica of each request that was sent, in order
    wanted: list[int] = field(default_factory=list)  # replicas that the requests asked for, every few seconds
    passed_on: int = 0  # prompts that a replica computed for another one
    late: int = 0  # of those: not all of it came in time


@dataclass(slots=True, kw_only=True)
class _Sent:
    """One request on its way: its parts on the replicas that served it."""

    row: TraceRow
    at: float
    parts: list[Served] = field(default_factory=list)
    replica: int = 0
    predicted: float = 0.0
    routed_at: float = 0.0


Make = Callable[[str, Setup, CostModel], FleetReplica]  # name, its setup, the cost that the router believes
Names = Callable[[TraceRow, int], tuple[int, ...]]  # row, number -> names of its blocks


def token_names(block_size: int, max_model_len: int) -> Names:
    """The names that a front makes from a prompt's tokens."""

    def names(row: TraceRow, number: int) -> tuple[int, ...]:
        request = as_request(row, number, at=0.0, max_model_len=max_model_len)
        return routed_names(request.prompt_token_ids, request.cache_salt, block_size)

    return names


class BlockNames:
    """Names of a load's own blocks, without tokens: a name stands for all blocks up to its own, of one scope."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int, str], int] = {}

    def __call__(self, row: TraceRow, number: int) -> tuple[int, ...]:  # noqa: ARG002 - as other names need it
        """The names of the row's full blocks."""
        if not row.block_tokens:
            return ()
        parent, found, scope = 0, [], row.scope or row.tenant
        for block in row.blocks[: row.input_tokens // row.block_tokens]:
            parent = self._names.setdefault((parent, block, scope), len(self._names) + 1)
            found.append(parent)
        return tuple(found)


class FleetSimulation:
    """One run of one load over one fleet."""

    def __init__(self, fleet: Fleet, make: Make, names: Names, *, every: float = 0.0) -> None:
        """`every`: seconds after which all views are made anew; 0: for each request."""
        fleet.check()
        self._fleet = fleet
        self._names = names
        self._every = every
        self._policy = route_policy(fleet.route)
        self._index = PrefixIndex()
        self._prompts: PromptReplicas | None = None
        setup, believed = fleet.replica, times(fleet.replica.cost, fleet.wrong_cost)
        slow = replace(setup, cost=times(setup.cost, fleet.slow))
        count = fleet.replicas - fleet.for_prompts
        self._labels = [f"r{number}" for number in range(count)]
        self._replicas = [
            make(name, slow if number == count - 1 else setup, believed) for number, name in enumerate(self._labels)
        ]
        self._number_of = {name: number for number, name in enumerate(self._labels)}
        for name in self._labels:
            self._index.add(name)
        self._slowness = [Slowness() for _ in self._labels]
        self._views = [one.view(0.0) for one in self._replicas]
        self._gone: set[int] = set()  # lost, noticed or not
        self._noticed: set[int] = set()
        self._late: deque[tuple[float, int, PrefixChanges]] = deque()  # frames that a stale index has not seen yet
        self._fresh_at = -1.0
        # A front that has been there for a while: its first minute is as long as every other.
        self._wanted = WantedReplicas(ttft_target=fleet.ttft_target, least=0, now=-WantedReplicas.window)
        self._asked_at = 0.0  # when the number was last asked for
        self._requests: dict[int, _Sent] = {}
        self._open: list[set[int]] = [set() for _ in self._labels]  # unfinished requests, as the front knows them
        self._found = FleetOutcome(outcome=Outcome(num_blocks=0), counts=[0] * count)

    def with_prompts(self, prompts: PromptReplicas) -> FleetSimulation:
        """Let these replicas compute prompts for the others."""
        self._prompts = prompts
        return self

    def run(self, rows: Sequence[TraceRow], *, speed: float = 1.0) -> FleetOutcome:
        """Serve the whole load to its end. Rows with equal blocks of one tenant share a prefix."""
        events: list[tuple[float, int, int]] = []  # (time, 0: a loss, 1: it is noticed; replica)
        for number, at in enumerate(self._fleet.lose_at):
            events += [(at, 0, number), (at + self._fleet.silence, 1, number)]
        heapify(events)
        for number, row in enumerate(rows):
            at = row.at / speed
            while events and events[0][0] <= at:
                self._happens(*heappop(events))
            self._requests[number] = _Sent(row=row, at=at)
            self._route(row, number, at, self._names(row, number), frozenset())
        while events:
            self._happens(*heappop(events))
        return self._finish()

    def _happens(self, at: float, kind: int, replica: int) -> None:
        self._refresh(at, all_of_them=True)
        if kind == 0:
            self._gone.add(replica)  # its view stays as it was, until the loss is noticed
            return
        self._noticed.add(replica)
        name = self._labels[replica]
        self._index.remove(name)
        self._views[replica] = replace(self._views[replica], state="silent")
        for number in sorted(self._open[replica]):
            sent = self._requests[number]
            part = sent.parts[-1]
            if part.refused or part.num_left == 0:
                continue
            self._found.moved += 1
            row = part.row
            rest = replace(row, input_tokens=row.input_tokens + part.num_tokens, output_tokens=part.num_left)
            self._route(rest, number, at, self._names(rest, number), frozenset((name,)))
        self._open[replica].clear()

    def _route(self, row: TraceRow, number: int, at: float, blocks: tuple[int, ...], excluded: frozenset[str]) -> None:
        self._refresh(at)
        request = RouteRequest(
            request_id=str(number),
            prompt_tokens=row.input_tokens,
            blocks=blocks,
            max_new_tokens=row.output_tokens,
            tenant=row.tenant,
            excluded=excluded,
        )
        route = self._policy.choose(request, self._views, self._index, at)
        chosen = self._number_of[route.name]
        sent = self._requests[number]
        sent.replica, sent.predicted, sent.routed_at = chosen, route.predicted_ttft, at
        self._index.sent(route.name, request.request_id, blocks)
        self._offer(row, route, at)
        self._found.counts[chosen] += 1
        self._found.chosen.append(chosen)
        self._open[chosen].add(number)
        if self._prompts is not None and self._prompts.takes(row, number, at, blocks, route=route, taker=chosen):
            return
        if chosen in self._gone:  # the loss is not noticed yet; then the request is moved
            sent.parts.append(Served(row=row, number=number, at=at))
            return
        replica = self._replicas[chosen]
        sent.parts.append(replica.send(row, number, at, blocks, route.hit_blocks))
        self._look(chosen, at)

    def _offer(self, row: TraceRow, route: Route, at: float) -> None:
        """Offer a request's work as a front does, by its view of the replica; the answer's length counts as known."""
        view = self._views[self._number_of[route.name]]
        uncached = max(row.input_tokens - route.hit_blocks * view.limits.block_size, 1)
        busy = request_seconds(view, prompt_tokens=uncached, output_tokens=row.output_tokens)
        self._wanted.offer(busy_seconds=busy, predicted_ttft=route.predicted_ttft, now=at)
        if at >= self._asked_at + ASK_SECONDS:
            self._ask(at)

    def _ask(self, at: float) -> None:
        self._asked_at = at
        ready = len(self._labels) - len(self._noticed)
        self._found.wanted.append(self._wanted.wanted(at, ready=ready).count)

    def _refresh(self, at: float, *, all_of_them: bool = False) -> None:
        """Let every replica work until now, and hear what it tells."""
        if not all_of_them and self._every and at < self._fresh_at + self._every:
            return
        self._fresh_at = at
        self._go_on(at)
        for number, replica in enumerate(self._replicas):
            if number not in self._gone:
                replica.advance(at)
                self._look(number, at)
        while self._late and self._late[0][0] <= at:
            _, number, changes = self._late.popleft()
            if number not in self._noticed:
                self._index.apply(self._labels[number], changes)

    def _go_on(self, until: float) -> None:
        """Requests whose prompts others have computed go on where they are answered."""
        if self._prompts is None:
            return
        for arrival in self._prompts.arrivals(until):
            row, replica = self._requests[arrival.number].row, self._replicas[arrival.taker]
            replica.advance(arrival.at)
            assert isinstance(replica, StepReplica)
            replica.adopt(row, arrival.number, arrival.tokens)
            blocks = arrival.tokens // replica.block_size
            served = replica.send(row, arrival.number, arrival.at, (), blocks)
            self._requests[arrival.number].parts.append(served)
            self._look(arrival.taker, arrival.at)

    def _look(self, number: int, at: float) -> None:
        replica, name = self._replicas[number], self._labels[number]
        for first in replica.first_tokens():
            self._index.answered(str(first.number))
            sent = self._requests[first.number]
            if not sent.parts[-1].refused:
                seen = first.at - sent.routed_at
                self._slowness[number].observe(predicted=sent.predicted, seen=seen, now=first.at)
                self._found.ratios.append(seen / max(sent.predicted, 1e-9))
        for changes in replica.prefixes():
            if self._fleet.stale:
                self._late.append((at + self._fleet.stale, number, changes))
            else:
                self._index.apply(name, changes)
        self._views[number] = replica.view(at, max(self._slowness[number].ratio(at), 1.0))

    def _finish(self) -> FleetOutcome:
        whole = self._found.outcome
        self._go_on(float("inf"))
        if self._prompts is not None:
            self._found.passed_on, self._found.late = self._prompts.num_passed, self._prompts.num_late
            for own in self._prompts.outcomes():
                whole.busy_seconds += own.busy_seconds
                whole.computed_tokens += own.computed_tokens
        for number, replica in enumerate(self._replicas):
            if number not in self._gone:
                replica.advance(float("inf"))
            own = replica.finish()
            whole.num_blocks += own.num_blocks
            whole.steps += own.steps
            whole.gaps.extend(own.gaps)
            for name in _SUMS:
                setattr(whole, name, getattr(whole, name) + getattr(own, name))
            for cause, count in own.preemptions_by_cause.items():
                whole.preemptions_by_cause[cause] = whole.preemptions_by_cause.get(cause, 0) + count
            if number not in self._gone:
                whole.seconds = max(whole.seconds, own.seconds)
        whole.requests = [_joined(number, sent, whole) for number, sent in self._requests.items()]
        self._ask(max((sent.at for sent in self._requests.values()), default=0.0))
        _note_live(whole)
        return self._found


_SUMS = (
    *("busy_seconds", "computed_tokens", "decode_tokens", "peak_blocks", "block_steps", "cumulative_blocks"),
    *("total_preemptions", "recomputed_tokens", "evictions", "guessed_tokens", "guessed_right"),
)


def _joined(number: int, sent: _Sent, whole: Outcome) -> Served:
    """One request's life over the replicas that served it."""
    parts = sent.parts
    last = parts[-1]
    answered = [part for part in parts if part.num_tokens]
    for before, after in pairwise(answered):
        whole.gaps.append(after.first_at - before.last_at)
    return Served(
        row=sent.row,
        number=number,
        at=sent.at,
        refused=last.refused,
        why=last.why,
        queue_seconds=parts[0].queue_seconds,
        first_at=answered[0].first_at if answered else 0.0,
        last_at=last.last_at,
        num_tokens=sum(part.num_tokens for part in parts),
        cached_tokens=min(answered[0].cached_tokens, sent.row.input_tokens) if answered else 0,
        preemptions=sum(part.preemptions for part in parts),
    )


def _note_live(whole: Outcome) -> None:
    """Accepted and unfinished requests over time."""
    changes = [(one.at, 1) for one in whole.done] + [(one.last_at, -1) for one in whole.done]
    live = 0
    for at, change in sorted(changes):
        live += change
        whole.note_live(at, live)


def simulate_steps(fleet: Fleet, rows: Sequence[TraceRow], *, speed: float = 1.0) -> FleetOutcome:
    """A fleet of real schedulers. Raises ConfigError."""
    if fleet.replicas > MOST_STEP_REPLICAS:
        raise ConfigError(
            f"{fleet.replicas} replicas are too many to simulate step by step, at most {MOST_STEP_REPLICAS}; use the"
            " coarse level"
        )
    config = fleet.replica.scheduler
    names = token_names(config.limits.block_size, config.max_model_len)
    made = FleetSimulation(fleet, StepReplica, names)
    if fleet.for_prompts:
        chunk = min(CHUNK_FOR_OTHERS, config.limits.prefill_chunk)
        setup, believed = fleet.replica, times(fleet.replica.cost, fleet.wrong_cost)
        own = setup.with_settings([("prefill_chunk", chunk)])
        them = [StepReplica(f"p{number}", own, believed) for number in range(fleet.for_prompts)]
        made.with_prompts(PromptReplicas(them, fleet.token_seconds))
    return made.run(rows, speed=speed)


def copies(rows: Sequence[TraceRow], count: int) -> tuple[TraceRow, ...]:
    """The load of `count` times as many users: further copies have names of their own and other times."""
    if count == 1:
        return tuple(rows)
    end = rows[-1].at + (rows[-1].at / max(len(rows) - 1, 1))
    made = []
    for number in range(count):
        apart = number * end / count
        for row in rows:
            tenant = f"{row.tenant or 'copy'}-{number}"
            made.append(replace(row, at=(row.at + apart) % end if end else row.at, tenant=tenant))
    made.sort(key=lambda row: row.at)
    return tuple(made)


def pooled_hits(rows: Iterable[TraceRow], num_tokens: int) -> float:
    """The share of prompt tokens that one cache of so many tokens would have, served in order and at once."""
    cache: OrderedDict[int, int] = OrderedDict()  # tokens of each block
    held = hits = asked = 0
    names = BlockNames()
    for number, row in enumerate(rows):
        asked += row.input_tokens
        chain = names(row, number)
        hits += row.block_tokens * sum(1 for _ in takewhile(cache.__contains__, chain))
        for name in reversed(chain):
            if name not in cache:
                held += row.block_tokens
            cache[name] = row.block_tokens
            cache.move_to_end(name)
        while held > num_tokens:
            held -= cache.popitem(last=False)[1]
    return hits / asked if asked else 0.0

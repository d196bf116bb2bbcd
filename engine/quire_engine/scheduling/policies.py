"""Scheduling policies: order of service, order of admission, preemption victim, chunk size, ITL target, elder.

A policy reads groups and returns a decision; it changes neither groups nor blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Protocol

from quire_engine.contract.limits import AdmissionName, SchedulerLimits, VictimName
from quire_engine.scheduling.account import OUTPUT_COST
from quire_engine.scheduling.fairness import FairQueue
from quire_engine.scheduling.forecast import ByExpectedPeak, ByPrompt, CapacityPolicy
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_prices import StepPrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """One policy of each kind."""

    order: OrderPolicy
    queue: QueuePolicy
    victim: VictimPolicy
    capacity: CapacityPolicy
    prices: StepPrices  # learned from each step
    chunk: FixedChunk
    itl: ItlTarget
    elder: ElderRule
    charge: Callable[[Mapping[Sequence, int]], None] | None = None  # called with each step's slices while groups wait


def policies_for(limits: SchedulerLimits) -> Policies:
    """The policies that the limits name."""
    name = limits.scheduling_policy
    deficit = DeficitLongestPrefix() if name == "dlpm" else None
    prices = StepPrices()
    queues: dict[str, QueuePolicy] = {"wfq": FairQueue(), "lpm": LongestPrefix()}
    return Policies(
        order=ByClass(PriorityOrder() if name == "priority" else FirstComeFirstServed()),
        queue=deficit or queues.get(name, AsOrdered()),
        charge=deficit.charge if deficit else None,
        victim=VICTIMS[limits.preemption_victim](),
        capacity=ADMISSIONS[limits.admission](prices),
        prices=prices,
        chunk=FixedChunk(limits.prefill_chunk),
        itl=ItlTarget(limits.itl_target),
        elder=ElderRule(limits.elder_age_steps),
    )


class OrderPolicy(Protocol):
    """The order of service: a smaller key runs and enters first, and is preempted last. Keys of live groups differ.

    A group's key never changes, so that a preempted group keeps its place.
    """

    def key(self, group: Group) -> tuple[float, ...]: ...


class FirstComeFirstServed:
    """The order of submission, after those that an earlier engine has begun, since their clients read already.

    Of these the oldest request comes first: a second engine's streams may be submitted after younger ones of a first.
    """

    def key(self, group: Group) -> tuple[float, ...]:
        return (0, group.request.arrival_time, group.arrival) if group.is_resumed else (1, group.arrival)


class PriorityOrder:
    """The order of priority, lower numbers first, and equal ones as `FirstComeFirstServed`."""

    def __init__(self) -> None:
        self._within = FirstComeFirstServed()

    def key(self, group: Group) -> tuple[float, ...]:
        return (group.request.priority, *self._within.key(group))


class ByClass:
    """Interactive groups before batch ones; another order within each class."""

    def __init__(self, within: OrderPolicy) -> None:
        self._within = within

    def key(self, group: Group) -> tuple[float, ...]:
        return (int(group.is_batch), *self._within.key(group))


MOST = 128  # groups that are reordered; the rest of the queue keeps its order
QUANTUM = 2048  # tokens, four usual steps; a smaller one is fairer in the short run, a larger one hits the cache more
_MOST_CLIENTS = 1024  # clients without waiting requests whose counters are kept
Client = tuple[str, str]  # (tenant, "") or ("", cache salt)


class QueuePolicy(Protocol):
    """The order of admission: yields every waiting group once.

    Called in every step with the queue in the order of `OrderPolicy`, without the resumed groups at its head, which
    enter first. The elder rule bounds the wait of the last ones.
    """

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]: ...


class AsOrdered:
    """The queue's own order."""

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]:  # noqa: ARG002
        return list(waiting)  # a copy: groups that enter leave the queue


class LongestPrefix:
    """Longest prefix match first (LPM of SGLang, Zheng et al., NeurIPS 2024); ties in the queue's order.

    A step looks up the prefixes of at most `MOST` groups, however many wait.
    """

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]:
        return [*sorted(waiting[:MOST], key=num_cached_tokens, reverse=True), *waiting[MOST:]]


class DeficitLongestPrefix:
    """Longest prefix match first, among the clients whose deficit counter is positive.

    DLPM of Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025. While requests wait, a client's counter
    falls by its computed prompt tokens and by twice its output tokens. Groups of clients with a positive counter enter
    by the length of their cached prefix. When no waiting client has a positive counter, every waiting client gets
    another quantum. So prefixes decide within a quantum and fairness beyond it: of two clients that both wait all the
    time, neither is served more than 2 (quantum + the largest cost of one request) ahead of the other.
    """

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._left: dict[Client, float] = {}

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterator[Group]:
        """Yields one group at a time: the cost of a group that has just entered counts for the next choice."""
        everyone = list(waiting)
        cached = {group: num_cached_tokens(group) for group in _first_of_each(everyone)}
        groups = sorted(cached, key=cached.__getitem__, reverse=True)
        left = self._begin({client(group) for group in groups})
        is_blocked = False
        while groups:
            group = next((group for group in groups if left[client(group)] > 0), None)
            if group is None and not is_blocked:
                self._refill(left, {client(group) for group in groups})
                continue
            group = group or groups[0]
            groups.remove(group)
            yield group
            if group.state == "running":
                left[client(group)] -= group.num_prompt_tokens - cached[group]
            else:
                is_blocked = True  # blocked by resources, not by its counter: no quantum is added for that
        yield from [group for group in everyone if group not in cached]

    def charge(self, slices: Mapping[Sequence, int]) -> None:
        """Charge a step's slices; tokens that a preempted group computes again are not charged twice."""
        for sequence, num_tokens in slices.items():
            name = client(sequence.group)
            if sequence.kv.num_computed >= sequence.num_prompt_tokens:
                self._left[name] = self._left.get(name, 0.0) - OUTPUT_COST * num_tokens
            elif sequence.group.num_preemptions == 0:
                self._left[name] = self._left.get(name, 0.0) - num_tokens

    def _begin(self, clients: set[Client]) -> dict[Client, float]:
        """A copy of the counters for one step, in which groups that enter are charged in advance."""
        for name in clients - self._left.keys():
            self._left[name] = 0.0
        if len(self._left) > len(clients) + _MOST_CLIENTS:
            for name in [name for name in self._left if name not in clients][:-_MOST_CLIENTS]:
                del self._left[name]
        return dict(self._left)

    def _refill(self, left: dict[Client, float], clients: set[Client]) -> None:
        """Add the same number of quanta to each client, until one of the counters is positive."""
        most = max(left[name] for name in clients)
        more = (int(-most // self._quantum) + 1) * self._quantum
        for name in clients:
            left[name] += more
            self._left[name] += more


def has_adapter_room(group: Group, running: Collection[str], most: int) -> bool:
    """Whether no more than `most` adapters run if the group does too; `running`: digests of those that run."""
    return not group.adapter or group.adapter in running or len(running) < most


def client(group: Group) -> Client:
    """The client that a request is charged to: its tenant, or without one its cache salt."""
    request = group.request
    return (request.tenant, "") if request.tenant else ("", request.cache_salt)


def _first_of_each(waiting: list[Group]) -> list[Group]:
    """Return at most `MOST` groups, equally many of each client, so that a long queue does not hide others."""
    queues: dict[Client, list[Group]] = {}
    for group in waiting:
        queues.setdefault(client(group), []).append(group)
    each = max(1, MOST // max(1, len(queues)))
    return [group for queue in queues.values() for group in queue[:each]][:MOST]


class VictimPolicy(Protocol):
    """The choice of a preemption victim: one of `running` (in order of service) other than `elder`.

    None only if there is no other. The caller preempts the group and asks again while blocks or slots are short.
    """

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None: ...


class Youngest:
    """The group that is served last: the youngest, with classes the youngest of the lowest class."""

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None:
        return next((group for group in reversed(running) if group is not elder), None)


class LongestRunning:
    """The group that has run longest since it last entered.

    Much is computed again under this policy; it serves loads with long outputs, where no request may keep its blocks
    for ever. The elder, which the policy would often choose, is excepted as always.
    """

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None:
        return min(_others(running, elder), key=lambda group: (group.entered_at, group.arrival), default=None)


class LowestClass:
    """Batch before interactive, then the largest priority number, then the last arrival."""

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None:
        return max(
            _others(running, elder),
            key=lambda group: (group.is_batch, group.request.priority, group.arrival),
            default=None,
        )


class LeastLost:
    """Batch before interactive, then the largest priority number, then the fewest tokens to compute again.

    Of equals it is the youngest.
    """

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None:
        return min(
            _others(running, elder),
            key=lambda group: (not group.is_batch, -group.request.priority, _computed(group), -group.arrival),
            default=None,
        )


def _others(running: Values[Group], elder: Group | None) -> Iterator[Group]:
    return (group for group in running if group is not elder)


def _computed(group: Group) -> int:
    """Tokens whose KV cache would be lost; a prompt that choices share counts once."""
    longest = max(sequence.kv.num_computed for sequence in group.sequences)
    return longest + sum(max(s.kv.num_computed - group.num_prompt_tokens, 0) for s in group.sequences[1:])


ADMISSIONS: Mapping[AdmissionName, Callable[[StepPrices], CapacityPolicy]] = {
    "expected": ByExpectedPeak,
    "prompt": lambda _: ByPrompt(),
}
VICTIMS: Mapping[VictimName, type[VictimPolicy]] = {
    "youngest": Youngest,
    "longest-running": LongestRunning,
    "lowest-class": LowestClass,
    "least-lost": LeastLost,
}


class FixedChunk:
    """The size of prefill chunks, except for the elder's first claim.

    At most `prefill_chunk` tokens of one sequence in one step, and half of the step's budget for a long prompt.

    A prompt that would take more than two whole steps leaves the other half to other prompts, so that short ones behind
    a long one start soon. The last steps of a prompt are not shared: all prompts would end later and none sooner.
    """

    def __init__(self, prefill_chunk: int) -> None:
        self._cap = prefill_chunk

    def size(self, *, pending: int, planned: int, budget: int, others: bool) -> int:
        """Tokens to add to the `planned` ones of this step, at most min(pending, budget); may be 0.

        `others`: later requests may use the half that is left; a second call without it assigns the tokens that remain.
        """
        if others and pending > 2 * budget:
            budget = (budget + 1) // 2
        return min(pending, self._cap - planned, budget)


FEWEST = 32  # prompt tokens; fewer share the reading of the weights, and each of them costs notably more
_WEIGHT = 0.3  # weight of the newest step in the moving average


class ItlTarget:
    """Bounds the inter-token latency (ITL) of running decodes by limiting the prompt tokens of their step.

    A decode waits about as long as the target for its next token, however long the prompts in the same steps are.

    The limit is the number of tokens that would have taken `seconds` at the rate of the last steps with prompts; 0 is
    no limit.

    Chunked prefills beside decodes are those of Sarathi-Serve (Agrawal et al., OSDI 2024); the token budget is measured
    here. A step takes a + b n seconds for n tokens, so asking for target * n / (a + b n) tokens each time leads to the
    n that takes the target. Prompts advance by `fewest` tokens even where that takes longer.
    """

    def __init__(self, seconds: float, fewest: int = FEWEST) -> None:
        self._target = seconds
        self._fewest = fewest
        self._seconds_per_token = 0.0  # 0: unknown

    def prompt_tokens(self, num_decodes: int) -> int:
        """The most prompt tokens of a step in which `num_decodes` running sequences get their next token."""
        if num_decodes == 0 or self._target == 0 or self._seconds_per_token == 0:
            return sys.maxsize
        return max(int(self._target / self._seconds_per_token) - num_decodes, self._fewest)

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step's size and its seconds."""
        if prompt_tokens < self._fewest:
            return  # its decodes take most of its time
        rate = seconds / (prompt_tokens + num_decodes)
        known = self._seconds_per_token
        self._seconds_per_token = known + _WEIGHT * (rate - known) if known else rate


class ElderRule:
    """Chooses the group whose progress is guaranteed: the first overdue one by arrival, or else the first live one.

    It is why every accepted request finishes, and within `SchedulerLimits.wait_bound` steps, whatever the other
    policies do, provided that the elder is kept until it ends.

    The scheduler's part: the elder is never preempted. It has the first claim on `min_chunk` tokens of every step, on
    slots for all its choices, and on blocks (all other groups' blocks can be taken, and its footprint fits the pool).
    So each step either computes `min_chunk` of its tokens or brings every unfinished choice of it forward by one token,
    and it ends within W = ceil((P + n G) / min_chunk) + G steps, a full recomputation included.

    Why the bound holds: a group is overdue once it is older than A + W. From then on, only the elder of that moment and
    overdue groups that arrived earlier come before it, each at most once. The elder of that moment is one of those that
    arrived earlier, or a younger one that was overdue first and so needs less than W. Together: A + W (until overdue) +
    W (such an elder) + the sum of W over all earlier groups + W (its own).
    """

    def __init__(self, age_steps: int) -> None:
        self._age_steps = age_steps

    def choose(self, live: Iterable[Group], step: int) -> Group | None:
        """The next elder, of `live` in order of arrival; the caller keeps it until it ends."""
        oldest: Group | None = None
        for group in live:
            oldest = oldest or group
            if step - group.added_step > self._age_steps + group.work:
                return group
        return oldest

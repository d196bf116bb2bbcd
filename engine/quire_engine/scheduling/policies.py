"""The scheduler's decisions: who goes first, who enters, who is preempted, how large chunks are, who is the elder.

A policy reads groups and answers; it changes neither groups nor blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Protocol

from quire_engine.limits import SchedulerLimits, VictimName
from quire_engine.scheduling.account import OUTPUT_COST
from quire_engine.scheduling.fairness import FairQueue
from quire_engine.scheduling.sequence import Group, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """One of each."""

    order: OrderPolicy
    queue: QueuePolicy
    victim: VictimPolicy
    capacity: WholePrompt
    chunk: FixedChunk
    itl: ItlTarget
    elder: ElderRule
    charge: Callable[[Mapping[Sequence, int]], None] | None = None  # is told each step's slices while anyone waits


def policies_for(limits: SchedulerLimits) -> Policies:
    """The policies that the settings name."""
    name = limits.scheduling_policy
    deficit = DeficitLongestPrefix() if name == "dlpm" else None
    queues: dict[str, QueuePolicy] = {"wfq": FairQueue(), "lpm": LongestPrefix()}
    return Policies(
        order=ByClass(PriorityOrder() if name == "priority" else FirstComeFirstServed()),
        queue=deficit or queues.get(name, AsOrdered()),
        charge=deficit.charge if deficit else None,
        victim=VICTIMS[limits.preemption_victim](),
        capacity=WholePrompt(),
        chunk=FixedChunk(limits.prefill_chunk),
        itl=ItlTarget(limits.itl_target),
        elder=ElderRule(limits.elder_age_steps),
    )


class OrderPolicy(Protocol):
    """Sorts groups; a smaller key is served and enters first, and is preempted last. Keys of live groups must differ.

    The order never changes during a group's life, so that a preempted group keeps its place.
    """

    def key(self, group: Group) -> tuple[int, ...]: ...


class FirstComeFirstServed:
    """By arrival."""

    def key(self, group: Group) -> tuple[int, ...]:
        return (group.arrival,)


class PriorityOrder:
    """By (priority, arrival): lower numbers go first, equal ones in order of submission."""

    def key(self, group: Group) -> tuple[int, ...]:
        return (group.request.priority, group.arrival)


class ByClass:
    """Interactive groups before batch ones, within each class by another order."""

    def __init__(self, within: OrderPolicy) -> None:
        self._within = within

    def key(self, group: Group) -> tuple[int, ...]:
        return (int(group.is_batch), *self._within.key(group))


MOST = 128  # groups; those behind them in the queue follow as they stand
QUANTUM = 2048  # tokens: four usual steps. Less is fairer in the short run, more leaves prefixes together for longer
_MOST_CLIENTS = 1024  # whose counters are kept while they have nothing to wait for
Client = tuple[str, str]  # a tenant, or a salt


class QueuePolicy(Protocol):
    """Whom of those who wait a step asks first: all of them, each once.

    The queue is arranged anew in every step; it is handed in the order of `OrderPolicy`. That the last are served in
    bounded time is the elder rule's work.
    """

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]: ...


class AsOrdered:
    """As the queue stands."""

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]:  # noqa: ARG002
        return list(waiting)  # a copy: whoever enters leaves the queue


class LongestPrefix:
    """Who has most of its prompt cached goes first (LPM of SGLang, Zheng et al., NeurIPS 2024); ties as they stand.

    A step looks up the prefixes of at most `MOST` groups, however many wait.
    """

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]:
        return [*sorted(waiting[:MOST], key=num_cached_tokens, reverse=True), *waiting[MOST:]]


class DeficitLongestPrefix:
    """The longest cached prefix among the clients that have something left of their share.

    DLPM of Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025. A client's counter falls by what is
    computed for it while anyone waits: prompt tokens, and output tokens at twice that. While it is positive, the
    client's groups go by their prefixes; when nobody who waits has a positive one, every client that waits gets a
    quantum more. So within a quantum the prefixes decide, and beyond it fairness does: of two clients that both wait
    all the time neither is served more than 2 (quantum + the most that one request costs) ahead of the other.
    """

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._left: dict[Client, float] = {}

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterator[Group]:
        """One by one: what a group that has entered is about to cost counts for those behind it."""
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
                is_blocked = True  # it has something left and found no room: nobody gets more because of that
        yield from [group for group in everyone if group not in cached]

    def charge(self, slices: Mapping[Sequence, int]) -> None:
        """A step computes so much, and somebody waits. What a preempted group computes again was paid for."""
        for sequence, num_tokens in slices.items():
            name = client(sequence.group)
            if sequence.kv.num_computed >= sequence.num_prompt_tokens:
                self._left[name] = self._left.get(name, 0.0) - OUTPUT_COST * num_tokens
            elif sequence.group.num_preemptions == 0:
                self._left[name] = self._left.get(name, 0.0) - num_tokens

    def _begin(self, clients: set[Client]) -> dict[Client, float]:
        """The counters for one step, in which they fall by what is only promised yet."""
        for name in clients - self._left.keys():
            self._left[name] = 0.0
        if len(self._left) > len(clients) + _MOST_CLIENTS:
            for name in [name for name in self._left if name not in clients][:-_MOST_CLIENTS]:
                del self._left[name]
        return dict(self._left)

    def _refill(self, left: dict[Client, float], clients: set[Client]) -> None:
        """As many quanta for each as it takes until one of them has something left."""
        most = max(left[name] for name in clients)
        more = (int(-most // self._quantum) + 1) * self._quantum
        for name in clients:
            left[name] += more
            self._left[name] += more


def client(group: Group) -> Client:
    """Whom a request is served for: its tenant; without one, those who share a cache, whatever name that has."""
    request = group.request
    return (request.tenant, "") if request.tenant else ("", request.cache_salt)


def _first_of_each(waiting: list[Group]) -> list[Group]:
    """At most `MOST` groups, as many of each client, so that nobody's queue hides another's."""
    queues: dict[Client, list[Group]] = {}
    for group in waiting:
        queues.setdefault(client(group), []).append(group)
    each = max(1, MOST // max(1, len(queues)))
    return [group for queue in queues.values() for group in queue[:each]][:MOST]


class VictimPolicy(Protocol):
    """Who gives up its blocks or slots when they run out: one of `running` (in serving order) other than `elder`.

    None only if there is no other. The caller preempts what is named and asks again while there is too little.
    """

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None: ...


class Youngest:
    """The running group that is served last: the youngest, within the lowest class where there are classes."""

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None:
        return next((group for group in reversed(running) if group is not elder), None)


class LongestRunning:
    """The one that has run longest since it last entered: those that have just begun get their turn.

    Much is computed again for that; where outputs are long and nobody may keep its blocks for ever, it is what is asked
    for. The elder, which it would often name, goes on whatever is chosen.
    """

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None:
        return min(_others(running, elder), key=lambda group: (group.entered_at, group.arrival), default=None)


class LowestClass:
    """Batch before interactive, then the largest number of priority, then who is served last."""

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None:
        return max(
            _others(running, elder),
            key=lambda group: (group.is_batch, group.request.priority, group.arrival),
            default=None,
        )


class LeastLost:
    """The one that has least to compute again, so that the pool's shortage costs least; of equals the youngest."""

    def choose(self, running: Values[Group], elder: Group | None) -> Group | None:
        return min(_others(running, elder), key=lambda group: (_computed(group), -group.arrival), default=None)


def _others(running: Values[Group], elder: Group | None) -> Iterator[Group]:
    return (group for group in running if group is not elder)


def _computed(group: Group) -> int:
    """Tokens whose keys and values go; what choices share counts once."""
    longest = max(sequence.kv.num_computed for sequence in group.sequences)
    return longest + sum(max(s.kv.num_computed - group.num_prompt_tokens, 0) for s in group.sequences[1:])


VICTIMS: Mapping[VictimName, type[VictimPolicy]] = {
    "youngest": Youngest,
    "longest-running": LongestRunning,
    "lowest-class": LowestClass,
    "least-lost": LeastLost,
}


class WholePrompt:
    """Admission by blocks: reserve the whole prompt and nothing for the output, so that a full pool preempts.

    Does not apply to the elder, whose blocks are made available. A preempted group re-enters only when one block more
    than its need is available. Without it, it would take the last block, lose it to the next decode that grows, and be
    computed again for nothing.
    """

    def fits(self, group: Group, *, need: int, available: int) -> bool:
        """`need`: blocks for all tokens the group knows, the cached prefix discounted."""
        return need + (1 if group.state == "preempted" else 0) <= available


class FixedChunk:
    """Sizes the slices of unfinished prompts, the elder's first claim excepted.

    At most `prefill_chunk` tokens of one sequence in one step, and half of the step where others may wait for long.

    A prompt that would take more than two such steps leaves them the other half, so that short ones behind a long one
    start soon; the last steps of a prompt are not worth sharing: all would end later and none sooner.
    """

    def __init__(self, prefill_chunk: int) -> None:
        self._cap = prefill_chunk

    def size(self, *, pending: int, planned: int, budget: int, others: bool) -> int:
        """Tokens to add to the `planned` ones of this step, at most min(pending, budget); 0 is none.

        `others`: requests behind this one may use what it leaves; it is asked again, without, when they have had it.
        """
        if others and pending > 2 * budget:
            budget = (budget + 1) // 2
        return min(pending, self._cap - planned, budget)


FEWEST = 64  # prompt tokens; a smaller product leaves part of the machine unused
_WEIGHT = 0.3  # of the newest step in the mean


class ItlTarget:
    """Bounds the inter-token latency (ITL) of running decodes by how many prompt tokens may share a step with them.

    A stream waits about as long as the target for its next token, however long the prompts beside it.

    As many tokens as would have taken `seconds` at the rate of the last steps with prompts in them; 0 is no bound.

    Chunks beside decodes are those of Sarathi-Serve (Agrawal et al., OSDI 2024); its token budget is found here by
    measuring. A step takes a + b n seconds for n tokens, so asking for target * n / (a + b n) tokens each time leads to
    the n that takes the target. Prompts go on by `fewest` tokens even where that takes longer.
    """

    def __init__(self, seconds: float, fewest: int = FEWEST) -> None:
        self._target = seconds
        self._fewest = fewest
        self._seconds_per_token = 0.0  # unknown

    def prompt_tokens(self, num_decodes: int) -> int:
        """Most prompt tokens of a step in which so many running sequences get their next token."""
        if num_decodes == 0 or self._target == 0 or self._seconds_per_token == 0:
            return sys.maxsize
        return max(int(self._target / self._seconds_per_token) - num_decodes, self._fewest)

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if prompt_tokens * 2 < self._fewest:
            return  # its time says more about the decodes
        rate = seconds / (prompt_tokens + num_decodes)
        known = self._seconds_per_token
        self._seconds_per_token = known + _WEIGHT * (rate - known) if known else rate


class ElderRule:
    """Names the group whose progress is guaranteed: the overdue one of least arrival, else the one of least arrival.

    It is why every accepted request finishes, and within `SchedulerLimits.wait_bound` steps, whatever the other
    policies do, if the elder is kept until it ends.

    The scheduler's part: the elder is never preempted; it has first claim on `min_chunk` tokens of every step, on
    slots for all its choices, and on blocks (all others' blocks can be taken, and its footprint fits the pool). So each
    step either computes `min_chunk` of its tokens or brings every unfinished choice of it forward by one token, and it
    ends within W = ceil((P + n G) / min_chunk) + G steps, a full recomputation included.

    Why the bound holds: a group is overdue once it is older than A + W. From then on only the elder of that moment and
    overdue groups that arrived earlier come before it, each at most once. The elder of that moment is one of those that
    arrived earlier, or a younger one that was overdue first and so needs less than W. Together:
    A + W (until overdue) + W (such an elder) + the sum of W over all earlier groups + W (its own).
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

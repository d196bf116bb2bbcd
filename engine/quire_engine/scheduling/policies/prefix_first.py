"""Who has most of its prompt computed already goes first: whoever it is (`lpm`), or fairly among clients (`dlpm`).

Owns, for `dlpm`, what each client may still be served. Promises: all who wait, each once; a step looks up the prefixes
of at most `MOST` groups, however many wait. Must not know: blocks, budgets, slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from quire_engine.scheduling.account import OUTPUT_COST
from quire_engine.scheduling.sequence import Group, Sequence

MOST = 128  # groups; those behind them in the queue follow as they stand
QUANTUM = 2048  # tokens: four usual steps. Less is fairer in the short run, more leaves prefixes together for longer
_MOST_CLIENTS = 1024  # whose counters are kept while they have nothing to wait for

Client = tuple[str, str]  # a tenant, or a salt


class LongestPrefix:
    """Who has most of its prompt cached goes first (LPM of SGLang, Zheng et al., NeurIPS 2024); ties as they stand."""

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
            if sequence.num_computed >= sequence.num_prompt_tokens:
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

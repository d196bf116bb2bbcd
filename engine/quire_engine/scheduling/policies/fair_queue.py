"""Who has got least for its weight goes first: weighted fair queueing by virtual token counters.

Promises: of two tenants that both wait all the time, neither gets ahead of the other by more than 2 max(p, 2 M) of
service over weight: p the longest prompt, M the tokens that the pool holds (Sheng et al., OSDI 2024, theorem 4.4).
Must not know: how accounts are kept, blocks, budgets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from quire_engine.scheduling.account import Account
from quire_engine.scheduling.sequence import Group


class FairQueue:
    """The tenant with the least counter, its requests as they stand; of equals the one that has got less in all.

    What has entered counts at once, so the order of the rest of a step follows from who has entered in it.
    """

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]:  # noqa: ARG002
        queues: dict[Account, deque[Group]] = {}
        for group in waiting:
            if group.account is not None:  # each has one under this policy
                queues.setdefault(group.account, deque()).append(group)
        if len(queues) == 1:
            return list(waiting)  # a copy: whoever enters leaves the queue
        return self._by_turns(queues)

    def _by_turns(self, queues: dict[Account, deque[Group]]) -> Iterator[Group]:
        heap = [(*_key(account, queue[0]), account) for account, queue in queues.items()]
        heapify(heap)
        while heap:
            account = heappop(heap)[-1]
            queue = queues[account]
            yield queue.popleft()
            if queue:
                heappush(heap, (*_key(account, queue[0]), account))


def _key(account: Account, head: Group) -> tuple[float, float, int]:
    """The head's arrival makes every key another one, so that accounts themselves are never compared."""
    return account.promised, account.service / account.weight, head.arrival

"""Weighted fair queueing: the order of tenants and of sizes of their prompts, and the accounts that it counts with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from quire_engine.contract.types import GenerationRequest, TenantStats
from quire_engine.scheduling.account import Account, size_class
from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.step_plan import StepPlan


class Accounts:
    """The accounts of tenants that requests have named; under fair queueing also that of requests without a tenant.

    The counters are those of the Virtual Token Counter (Sheng et al., OSDI 2024): a prompt token counts 1, an output
    token 2, both divided by the tenant's weight. Prompt tokens are charged when they are computed, without those that
    the prefix cache had; else tenants with hot prefixes would pay for work that was never done. Output tokens are
    charged as they come. Each token is charged once, also when a preempted request computes it again. A tenant that
    returns from idleness starts at the counter of those that waited.
    """

    def __init__(self, *, of_everyone: bool) -> None:
        self._of_everyone = of_everyone  # as under fair queueing, where each size class has an account too
        self._by_tenant: dict[str, Account] = {}
        self._last_to_enter: Account | None = None

    @property
    def num_tenants(self) -> int:
        """Tenants with an account."""
        return len(self._by_tenant)

    def open(self, request: GenerationRequest, num_tokens: int) -> Account | None:
        """The account that a request is charged to; None where none is kept.

        `num_tokens`: the prompt tokens that it would have to compute if it entered now.
        """
        if not (self._of_everyone or request.tenant):
            return None
        payer = self._by_tenant.get(request.tenant)
        if payer is None:
            payer = self._by_tenant[request.tenant] = Account(tenant=request.tenant)
        elsewhere = request.service_elsewhere
        payer.update(weight=request.weight, max_running=request.max_running, elsewhere=elsewhere)
        return payer.of_size(size_class(num_tokens)) if self._of_everyone else payer

    def begin_to_wait(self, group: Group, waiting: Iterable[Group]) -> None:
        """A group is about to wait beside `waiting`: its account gets no credit for the time in which it was idle."""
        account = group.account
        if account is None:
            return
        others = {other.account for other in waiting if other.account is not None and other is not group}
        payer = account.payer
        _lift(payer, {other.payer for other in others}, self._last_to_enter)
        if account is not payer:
            _lift(account, {other for other in others if other.payer is payer}, payer.last_to_enter)

    def enter(self, group: Group, num_cached_tokens: int) -> None:
        """A group enters with a cached prefix; a group that had entered before was charged then."""
        if group.account is None:
            return
        self._last_to_enter = payer = group.account.payer
        payer.last_to_enter = group.account
        if group.first_scheduled is None:
            is_resumed = bool(group.request.resumed_token_ids)
            group.note_charged(
                group.num_prompt_tokens if is_resumed else min(num_cached_tokens, group.num_prompt_tokens)
            )
            group.account.begin(group.num_uncharged)

    def charge(self, plan: StepPlan) -> None:
        """Charge a step's prompt tokens, except those that are computed again."""
        if not self._by_tenant:
            return
        for sequence, num_tokens in plan.slices.items():
            group = sequence.group
            if group.account is None or not group.num_uncharged:
                continue
            charged = group.num_prompt_tokens - group.num_uncharged
            end = min(sequence.kv.num_computed + num_tokens, group.num_prompt_tokens)
            if end > charged:
                group.account.charge_prompt(end - charged)
                group.note_charged(end)

    def has_seats(self, group: Group, running: Iterable[Group]) -> bool:
        """Whether the tenant's quota lets the group's sequences run too; it always allows one group alone."""
        payer = group.payer
        if payer is None or not payer.max_running:
            return True
        own = sum(len(other.sequences) for other in running if other.payer is payer)
        return own == 0 or own + len(group.sequences) <= payer.max_running

    def stats(self, running: Iterable[Group], waiting: Iterable[Group]) -> tuple[TenantStats, ...]:
        """The statistics of each tenant, in the order in which they first came; none where no request names one."""
        if self._by_tenant.keys() <= {""}:
            return ()
        runs, waits = _sequences(running), _sequences(waiting)
        return tuple(
            TenantStats(
                tenant=account.tenant,
                running=runs.get(account.tenant, 0),
                waiting=waits.get(account.tenant, 0),
                total_prompt_tokens=account.prompt_tokens,
                total_output_tokens=account.output_tokens,
                total_service=float(account.service),
            )
            for account in self._by_tenant.values()
        )


def _sequences(groups: Iterable[Group]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for group in groups:
        if group.account is not None:
            tenant = group.account.tenant
            counts[tenant] = counts.get(tenant, 0) + len(group.sequences)
    return counts


def _lift(account: Account, waiting: set[Account], last_to_enter: Account | None) -> None:
    """Raise an account that begins to wait to the least of those that wait, or to that of the last to enter."""
    if account in waiting:
        return
    if waiting:
        account.lift(min(other.virtual for other in waiting))
    elif last_to_enter is not None:
        account.lift(last_to_enter.virtual)


class FairQueue:
    """Weighted fair queueing: the tenant with the smallest service/weight is served first.

    Of equals the tenant with less service in all goes first. Of two tenants that both wait all the time, neither gets
    ahead of the other by more than 2 max(p, 2 M) of service over weight: p the longest prompt, M the tokens that the
    pool holds (Sheng et al., OSDI 2024, theorem 4.4).

    The size classes of one tenant's requests share its service in the same way, with equal weights, each in the queue's
    order. So short prompts do not wait for all the long ones before them, also where everyone is one tenant, and long
    prompts always have their part. Serving the shortest first would be a little faster for short prompts, but would
    leave long ones to the elder rule.

    A group that enters is charged at once, so the order of the rest of a step depends on it.
    """

    def arrange(self, waiting: list[Group], num_cached_tokens: Callable[[Group], int]) -> Iterable[Group]:  # noqa: ARG002
        of_sizes: dict[Account, list[Group]] = {}
        for group in waiting:
            if group.account is not None:  # every group has one under this policy
                of_sizes.setdefault(group.account, []).append(group)
        queues: dict[Account, dict[Account, list[Group]]] = {}
        for account, groups in of_sizes.items():
            queues.setdefault(account.payer, {})[account] = groups
        return _by_turns(
            {payer: _by_turns({a: iter(own) for a, own in sizes.items()}) for payer, sizes in queues.items()}
        )


def _by_turns(queues: Mapping[Account, Iterator[Group]]) -> Iterator[Group]:
    """The groups of all queues: next is always the first of the account that is to be served."""
    if len(queues) == 1:
        yield from next(iter(queues.values()))
        return
    heap = [(*_key(account), number, account) for number, account in enumerate(queues)]
    heapify(heap)
    while heap:
        *_, number, account = heappop(heap)
        group = next(queues[account], None)
        if group is not None:
            yield group
            heappush(heap, (*_key(account), number, account))


def _key(account: Account) -> tuple[float, float]:
    """A number that follows it makes all entries different, so that accounts themselves are never compared."""
    return account.promised, account.service / account.weight

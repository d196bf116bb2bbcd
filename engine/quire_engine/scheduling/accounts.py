"""The virtual counters that fair queueing goes by, and each tenant's totals for who asks.

Owns the accounts. Promises: an account is charged once for each token, whatever is preempted and computed again; who
returns from idleness begins no further back than those who waited. Must not know: the order of the queue, blocks.

The counters are those of the Virtual Token Counter (Sheng et al., OSDI 2024): a prompt token counts 1, one of output 2,
both divided by the tenant's weight. Prompts are charged as they are computed, without what the prefix cache had, or
tenants with hot prefixes would pay for work that nobody did; output is charged as it comes.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire_engine.scheduling.account import Account
from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.step_plan import StepPlan
from quire_engine.types import GenerationRequest, TenantStats


class Accounts:
    """Of every tenant that a request has named; where fair queueing needs them, of those without a name too."""

    def __init__(self, *, of_everyone: bool) -> None:
        self._of_everyone = of_everyone
        self._by_tenant: dict[str, Account] = {}
        self._last_to_enter: Account | None = None

    def open(self, request: GenerationRequest, waiting: Iterable[Group]) -> Account | None:
        """The account that a request which begins to wait beside those `waiting` is charged to; None: nobody counts."""
        if not (self._of_everyone or request.tenant):
            return None
        account = self._by_tenant.get(request.tenant)
        if account is None:
            account = self._by_tenant[request.tenant] = Account(tenant=request.tenant)
        account.update(weight=request.weight, max_running=request.max_running)
        others = {group.account for group in waiting if group.account is not None}
        if others:
            if account not in others:
                account.lift(min(other.virtual for other in others))
        elif self._last_to_enter is not None:
            account.lift(self._last_to_enter.virtual)
        return account

    def enter(self, group: Group, num_cached_tokens: int) -> None:
        """A group enters with so much of its prompt cached. What was begun before has been charged before."""
        if group.account is None:
            return
        self._last_to_enter = group.account
        if group.first_scheduled is None:
            is_resumed = bool(group.request.resumed_token_ids)
            group.note_charged(
                group.num_prompt_tokens if is_resumed else min(num_cached_tokens, group.num_prompt_tokens)
            )
            group.account.begin(group.num_uncharged)

    def charge(self, plan: StepPlan) -> None:
        """A step computes so much of prompts, some of it perhaps not for the first time."""
        if not self._by_tenant:
            return
        for sequence, num_tokens in plan.slices.items():
            group = sequence.group
            if group.account is None or not group.num_uncharged:
                continue
            charged = group.num_prompt_tokens - group.num_uncharged
            end = min(sequence.num_computed + num_tokens, group.num_prompt_tokens)
            if end > charged:
                group.account.charge_prompt(end - charged)
                group.note_charged(end)

    def has_seats(self, group: Group, running: Iterable[Group]) -> bool:
        """Whether the group's sequences may run, too, by the quota of its tenant; a group alone always may."""
        account = group.account
        if account is None or not account.max_running:
            return True
        own = sum(len(other.sequences) for other in running if other.account is account)
        return own == 0 or own + len(group.sequences) <= account.max_running

    def stats(self, running: Iterable[Group], waiting: Iterable[Group]) -> tuple[TenantStats, ...]:
        """Of each tenant, in the order in which they first came."""
        if not self._by_tenant:
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

"""Budgets: the tokens that a tenant may use on a day and in a month, both of UTC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Literal

from quire_server.engine.tenants import Tenant
from quire_server.errors import BudgetSpent
from quire_server.metrics.usage import UsageBook

LONGEST_SECONDS = 59.0  # of Retry-After. From 60 s on, older OpenAI SDKs retry at their own pace; above 120 s all do


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One budget of a tenant: prompt tokens when they are accepted, cached ones too, and output tokens as they come."""

    period: Literal["day", "month"]
    limit: int
    used: int
    resets_at: datetime

    @property
    def left(self) -> int:
        """The tokens that are left."""
        return max(self.limit - self.used, 0)


def budgets_of(tenant: Tenant, usage: UsageBook) -> Iterator[Budget]:
    """The tenant's budgets, with what is used of them."""
    today = usage.today
    if tenant.tokens_per_day is not None:
        yield _budget("day", tenant.tokens_per_day, usage.tokens(tenant.name, today), today + timedelta(days=1))
    if tenant.tokens_per_month is not None:
        first = today.replace(day=1)
        following = (first + timedelta(days=32)).replace(day=1)
        yield _budget("month", tenant.tokens_per_month, usage.tokens(tenant.name, first), following)


def check_budgets(tenant: Tenant, prompt_tokens: int, usage: UsageBook) -> None:
    """Raises BudgetSpent if prompts of so many tokens are more than what is left of a budget.

    The output of accepted requests may exceed the budget: a request that runs is not cut off.
    """
    spent = [budget for budget in budgets_of(tenant, usage) if prompt_tokens > budget.left]
    if spent:
        budget = max(spent, key=lambda each: each.resets_at)
        seconds = (budget.resets_at - usage.now).total_seconds()
        raise BudgetSpent(
            f"The tenant's budget of {budget.limit} tokens a {budget.period} has {budget.left} left, the prompt has"
            f" {prompt_tokens}; the next {budget.period} begins at {budget.resets_at:%Y-%m-%dT%H:%M:%SZ}.",
            retry_after_seconds=min(seconds, LONGEST_SECONDS),
            code=f"tenant_{budget.period}_budget",
            come_again=seconds <= LONGEST_SECONDS and prompt_tokens <= budget.limit,
        )


def _budget(period: Literal["day", "month"], limit: int, used: int, ends: date) -> Budget:
    return Budget(period=period, limit=limit, used=used, resets_at=datetime.combine(ends, time(), UTC))

"""What each tenant asks for and gets, by the names that the operator has given.

Promises: labels are the names of the list of tenants, each there from the start; nothing is exported without a list.
Must not know: requests, keys, how limits are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_server.metrics.metric_values import Values

TENANT_REFUSALS = ("tenant_requests", "tenant_tokens", "tenant_queue")


class TenantMetrics:
    """Counters with a tenant's name."""

    def __init__(self, values: Values, tenants: Sequence[str]) -> None:
        self._accepted = values.counter(
            "quire_tenant_requests",
            "Prompts accepted, by tenant.",
            ("tenant",),
            children=[(name,) for name in tenants],
        )
        self._refused = values.counter(
            "quire_tenant_rejected",
            "Requests refused for a tenant's rate or quota, by tenant and reason.",
            ("tenant", "reason"),
            children=[(name, reason) for name in tenants for reason in TENANT_REFUSALS],
        )
        self._tokens = values.counter(
            "quire_tenant_tokens",
            "Tokens that fair shares are made of, by tenant and kind: prompt, uncached and computed once, or output.",
            ("tenant", "kind"),
            children=[(name, kind) for name in tenants for kind in ("prompt", "output")],
        )
        self._queue_seconds = values.counter(
            "quire_tenant_queue_seconds",
            "Time from arrival to the first step, summed over prompts, by tenant.",
            ("tenant",),
            children=[(name,) for name in tenants],
        )
        self._names = frozenset(tenants)

    def accepted(self, tenant: str) -> None:
        self._accepted.inc(1, tenant)

    def refused(self, tenant: str, reason: str) -> None:
        self._refused.inc(1, tenant, reason)

    def computed(self, tenant: str, *, prompt: int, output: int) -> None:
        self._tokens.inc(prompt, tenant, "prompt")
        self._tokens.inc(output, tenant, "output")

    def queued(self, tenant: str, seconds: float) -> None:
        """A prompt of the tenant waited so long."""
        if tenant in self._names:
            self._queue_seconds.inc(seconds, tenant)

"""Tenants that change while their requests run: rates keep their levels, and nothing is charged twice."""

from __future__ import annotations

import pytest

from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams, TenantStats
from quire_server.engine.admission import TenantGate
from quire_server.engine.tenants import Tenant
from quire_server.errors import QueueFull
from quire_server.metrics.metrics import Metrics

NOW = 1000.0


def request(tokens: int = 10) -> GenerationRequest:
    return GenerationRequest(
        request_id="a",
        prompt_token_ids=tuple(range(tokens)),
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=1),
        tenant="acme",
    )


def acme(**limits: float) -> Tenant:
    return Tenant(name="acme", **limits)  # type: ignore[arg-type]


def gate(*tenants: Tenant) -> TenantGate:
    return TenantGate(tenants, Metrics("tiny", tenants=[each.name for each in tenants]).tenants, NOW)


def stats(output: int) -> list[TenantStats]:
    return [TenantStats(tenant="acme", total_output_tokens=output)]


def take(it: TenantGate, tokens: int, now: float = NOW) -> None:
    it.check(request(tokens), now)
    it.take(request(tokens), now)
    it.release(request(tokens), now)


def test_a_rate_that_stays_keeps_its_level_and_another_begins_anew() -> None:
    it = gate(acme(tokens_per_minute=100.0))
    take(it, 100)
    it.change([acme(tokens_per_minute=100.0, weight=3.0)], NOW)
    with pytest.raises(QueueFull):
        it.check(request(), NOW)
    it.change([acme(tokens_per_minute=200.0)], NOW)
    take(it, 200)
    it.change([acme()], NOW)
    take(it, 1000)


def test_a_tenant_that_comes_back_is_not_charged_for_what_it_had_before() -> None:
    """The engine's totals go on while the gate does not know the tenant."""
    it = gate(acme())
    it.observe(stats(5_000), NOW)
    it.change([], NOW)
    it.observe(stats(6_000), NOW)
    it.change([acme(tokens_per_minute=100.0)], NOW)
    it.observe(stats(6_020), NOW)
    take(it, 80)
    with pytest.raises(QueueFull):
        it.check(request(), NOW)


def test_a_tenant_that_was_taken_away_is_forgotten_when_its_requests_have_ended() -> None:
    it = gate(acme(max_queued=1))
    it.take(request(), NOW)
    for _ in range(2):
        it.change([], NOW)
        it.change([acme(max_queued=1)], NOW)
        with pytest.raises(QueueFull):
            it.check(request(), NOW)
    it.change([], NOW)
    it.release(request(), NOW)
    it.change([], NOW)
    it.check(request(), NOW)
    it.change([acme(max_queued=1)], NOW)
    it.check(request(), NOW)

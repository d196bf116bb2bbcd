"""The caller of a request, from its headers: the tenant, the scope of its cached prefixes, its client's timeout.

The shorter of the header's and the body's timeout counts, from the arrival of the request.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from fastapi import Request

from quire_engine.contract.types import GenerationRequest
from quire_server.engine.tenants import NOBODY, Tenant, name_of_key
from quire_server.errors import BadRequest
from quire_server.http.own_requests import vouched_for
from quire_server.metrics.request_record import CURRENT
from quire_server.state import state_of

TIMEOUT_HEADER = "x-request-timeout"
LONGEST_TIMEOUT = 86_400.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The client of one request. `claim` sets its tenant, cache scope and deadline on engine requests."""

    tenant: Tenant = NOBODY
    cache_scope: str = ""  # prefixes are shared within it alone; empty: with all callers who have none
    timeout: float | None = None  # seconds, from the header
    came_at: float = field(default_factory=time.monotonic)

    def claim(self, request: GenerationRequest, *, timeout: float | None, is_batch: bool) -> GenerationRequest:
        """The request with its tenant, cache scope and deadline; `timeout` and `is_batch` come from the body.

        The scope goes before the client's own salt, so that a salt that was copied opens nothing of another scope. The
        engine hashes both into a prefix's first block: the scope holds for blocks being computed, swapped and on disk.
        """
        times = [seconds for seconds in (self.timeout, timeout) if seconds is not None]
        tenant = self.tenant
        return replace(
            request,
            tenant=tenant.name,
            # A client's salt has no control characters, so it cannot end the scope.
            cache_salt=f"{self.cache_scope}\0{request.cache_salt}" if self.cache_scope else request.cache_salt,
            weight=tenant.weight,
            max_running=tenant.max_running or 0,
            service_class="batch" if is_batch else tenant.service_class,
            deadline=self.came_at + min(times) if times else None,
        )


def caller_of(request: Request) -> Caller:
    """The tenant of the request's key, and its X-Request-Timeout. Raises BadRequest."""
    tenant, digest = tenant_of(request)
    if vouched_for(request.scope) is not None:  # a line of a batch, which goes after all live requests
        tenant = replace(tenant, service_class="batch")
    story = CURRENT.get()
    if story is not None:
        story.account = account_of(request)
    return Caller(
        tenant=tenant, cache_scope=_scope(tenant, digest), timeout=_timeout(request.headers.getlist(TIMEOUT_HEADER))
    )


def tenant_of(request: Request) -> tuple[Tenant, str]:
    """The tenant of the request's key, and the key's digest, which is empty where no key is required."""
    known = request.scope.get("state", {})
    digest = known.get("key_digest", "")
    return state_of(request).tenants.of(digest, known.get("key_name", "")), digest


def is_own(request: Request, other: GenerationRequest) -> bool:
    """Whether an engine's request is of the same caller: of its tenant, or else of its key; without keys all are."""
    tenant, digest = tenant_of(request)
    return (other.tenant, other.cache_scope) == (tenant.name, _scope(tenant, digest))


def account_of(request: Request) -> str:
    """The name that the request's tokens are counted for: its tenant's, else its key's, else a part of its digest.

    Empty on a server without keys.
    """
    tenant, digest = tenant_of(request)
    return tenant.name or name_of_key(digest, request.scope.get("state", {}).get("key_name", ""))


def _scope(tenant: Tenant, key_digest: str) -> str:
    """The tenant's group, else the tenant, else the API key; empty on a server without keys."""
    if tenant.prefix_group:
        return f"group {tenant.prefix_group}"
    if tenant.name:
        return f"tenant {tenant.name}"
    return f"key {key_digest}" if key_digest else ""


def _timeout(values: list[str]) -> float | None:
    if not values:
        return None
    try:
        (text,) = values
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT:
        raise BadRequest(
            f"The header X-Request-Timeout must be a number of seconds, more than 0 and at most {LONGEST_TIMEOUT:g}.",
            param=TIMEOUT_HEADER,
        )
    return seconds

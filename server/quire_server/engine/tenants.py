"""The operator's tenants: their limits, and whose a key is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire_engine.types import ServiceClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """The limits of one tenant; None is no limit."""

    name: str
    weight: float = 1.0
    service_class: ServiceClass = "interactive"
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_queued: int | None = None  # waiting sequences
    max_running: int | None = None  # running sequences
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    prefix_group: str = ""  # tenants of one group share cached prefixes; empty: none does with this one


NOBODY = Tenant(name="")  # requests whose key belongs to no tenant


class Tenants:
    """The operator's tenants, by the digests of their keys."""

    def __init__(self, by_digest: Mapping[str, Tenant] | None = None, *, names_of_keys: bool = False) -> None:
        self._by_digest = dict(by_digest or {})
        self._names_of_keys = names_of_keys  # whether each named key is a tenant of its own

    @property
    def all(self) -> tuple[Tenant, ...]:
        """Each listed tenant once; tenants from key names are not listed."""
        return tuple({tenant.name: tenant for tenant in self._by_digest.values()}.values())

    def of(self, key_digest: str, key_name: str) -> Tenant:
        """The tenant of a request's key; both arguments are empty where no key is required."""
        found = self._by_digest.get(key_digest)
        if found is not None:
            return found
        return Tenant(name=key_name) if self._names_of_keys and key_name else NOBODY

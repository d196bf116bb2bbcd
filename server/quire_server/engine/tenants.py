"""The operator's tenants: their limits, and whose a key is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire_engine.contract.types import ServiceClass


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


_DIGITS = 8  # of a digest: enough to tell an operator's keys apart
NOBODY = Tenant(name="")  # requests whose key belongs to no tenant


class Tenants:
    """The operator's tenants, by the digests of their keys."""

    def __init__(self, by_digest: Mapping[str, Tenant] | None = None, *, keys_are_tenants: bool = False) -> None:
        self._by_digest = dict(by_digest or {})
        self._keys_are_tenants = keys_are_tenants  # whether each key that is not listed is a tenant of its own

    @property
    def all(self) -> tuple[Tenant, ...]:
        """Each listed tenant once; keys that are tenants are not listed."""
        return tuple({tenant.name: tenant for tenant in self._by_digest.values()}.values())

    def key_of(self, name: str) -> str | None:
        """The digest of a key of a listed tenant; None: no tenant of this name is listed."""
        return next((digest for digest, tenant in self._by_digest.items() if tenant.name == name), None)

    def of(self, key_digest: str, key_name: str) -> Tenant:
        """The tenant of a request's key; both arguments are empty where no key is required."""
        found = self._by_digest.get(key_digest)
        if found is not None:
            return found
        if not self._keys_are_tenants or not key_digest:
            return NOBODY
        return Tenant(name=name_of_key(key_digest, key_name))


def name_of_key(digest: str, name: str) -> str:
    """The name for what a key uses: its own, or a part of its digest; empty on a server without keys."""
    return name or (f"key-{digest[:_DIGITS]}" if digest else "")

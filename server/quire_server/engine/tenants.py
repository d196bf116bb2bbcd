"""Who requests belong to: the tenants that an operator has named, and which one a key stands for.

Promises: the set of names is the operator's, whoever calls. Must not know: keys, HTTP, files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire_engine.types import ServiceClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """What one tenant may have; None is without a limit."""

    name: str
    weight: float = 1.0
    service_class: ServiceClass = "interactive"
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_queued: int | None = None  # sequences that wait
    max_running: int | None = None  # sequences that run


NOBODY = Tenant(name="")  # those whose key stands for no tenant


class Tenants:
    """Looks tenants up by the digests of their keys."""

    def __init__(self, by_digest: Mapping[str, Tenant] | None = None, *, names_of_keys: bool = False) -> None:
        self._by_digest = dict(by_digest or {})
        self._names_of_keys = names_of_keys  # without a list of tenants, each key with a name is one

    @property
    def all(self) -> tuple[Tenant, ...]:
        """Each once; of keys with names there is no list."""
        return tuple({tenant.name: tenant for tenant in self._by_digest.values()}.values())

    def of(self, key_digest: str, key_name: str) -> Tenant:
        """The tenant of the key that was brought; both are empty where none was needed."""
        found = self._by_digest.get(key_digest)
        if found is not None:
            return found
        return Tenant(name=key_name) if self._names_of_keys and key_name else NOBODY

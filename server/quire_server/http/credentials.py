"""The keys, tenants and certificate that hold now. They are read again while the server runs.

Promises: a reload reads every file first, and where one cannot be used all stays as it was. Keys are checked once per
request and a certificate is shown once per handshake, so streams and connections go on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field

from quire_engine.contract.errors import ConfigError
from quire_server.errors import BadRequest
from quire_server.http.tls import ServerTls
from quire_server.settings import Settings
from quire_server.settings.keys import ApiKey, Keys, TenantEntry

log = logging.getLogger("quire.keys")

KnownKeys = Mapping[bytes, str]  # names, or empty texts, by the SHA-256 of the keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The digests of the keys, and the tenants, as they were read at one time."""

    api: KnownKeys
    admin: KnownKeys
    tenants: tuple[TenantEntry, ...]


class Change(BaseModel):
    """The keys, or tenants, that a reload has added and removed."""

    added: int = 0
    removed: int = 0


class TenantChange(Change):
    """The tenants that a reload has added, removed and changed."""

    changed: int = 0  # other keys, weights or limits


class Reloaded(BaseModel):
    """The changes that a reload has made."""

    keys: Annotated[Change, Field(description="of clients: API keys and keys of tenants")]
    admin_keys: Change
    tenants: TenantChange
    certificate_expires: Annotated[
        str | None, Field(description="in ISO 8601; null on a server without HTTPS, or where it cannot be told")
    ]


class Credentials:
    """The present `Known` and TLS context of one server, and their reload."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where the certificate cannot be used."""
        self._settings = settings
        self._reloading = asyncio.Lock()
        self._usage_file = settings.first_keys.tenants.usage_file
        self.known = _known(settings.first_keys)
        self.tls = None if settings.ssl_certfile is None else ServerTls(settings)
        self.on_tenants: Callable[[Sequence[TenantEntry]], None] = lambda _: None  # called after a reload, as is
        self.on_reloaded: Callable[[], None] = lambda: None

    async def reload(self) -> Reloaded:
        """Read all files again; from then on what they have holds. Raises BadRequest and changes nothing."""
        async with self._reloading:  # one that began later ends later
            try:
                keys = await asyncio.to_thread(self._settings.key_sources.read)
                if keys.tenants.usage_file != self._usage_file:
                    raise ValueError(
                        f"--tenants {self._settings.tenants}: another `usage_file:` takes effect at a start only"
                    )
                context = None if self.tls is None else await asyncio.to_thread(self.tls.read)
            except (ValueError, ConfigError) as error:
                log.error("keys and certificates stay as they were: %s", error)
                raise BadRequest(
                    f"Nothing has changed: {error}; correct the file and reload again.", code="reload_refused"
                ) from None
            before, self.known = self.known, _known(keys)
            if self.tls is not None and context is not None:
                self.tls.show(context)
            self.on_tenants(self.known.tenants)
            self.on_reloaded()
            return self._told(before)

    def adopt(self, api: KnownKeys, tenants: tuple[TenantEntry, ...]) -> None:
        """Take the keys of clients and the tenants that another process has read."""
        self.known = Known(api=api, admin=self.known.admin, tenants=tenants)
        self.on_tenants(tenants)

    async def adopt_certificate(self) -> None:
        """Show the certificate that another process has found to be good; one that is gone leaves the old one."""
        if self.tls is not None:
            try:
                self.tls.show(await asyncio.to_thread(self.tls.read))
            except ConfigError as error:
                log.error("the certificate stays as it was: %s", error)

    def _told(self, before: Known) -> Reloaded:
        expires = None if self.tls is None else self.tls.expires
        change = Reloaded(
            keys=_change(before.api, self.known.api),
            admin_keys=_change(before.admin, self.known.admin),
            tenants=_tenant_change(before.tenants, self.known.tenants),
            certificate_expires=None if expires is None else expires.isoformat(timespec="seconds"),
        )
        log.info("reloaded: %s", shown(change))
        if expires is not None and expires <= datetime.now(UTC):
            log.warning("--ssl-certfile %s: the certificate has expired", self._settings.ssl_certfile)
        return change


def shown(change: Reloaded) -> str:
    """The change in words, for a line of the log."""
    words = [
        f"{name} {one.added} added, {one.removed} removed"
        for name, one in (("keys", change.keys), ("admin keys", change.admin_keys), ("tenants", change.tenants))
    ]
    words[-1] += f", {change.tenants.changed} changed"
    if change.certificate_expires is not None:
        words.append(f"the certificate expires at {change.certificate_expires}")
    return "; ".join(words)


def _known(keys: Keys) -> Known:
    api = _digests(keys.api)
    for tenant in keys.tenants.tenants:
        for digest in tenant.key_sha256:
            api.setdefault(bytes.fromhex(digest), tenant.name)
    return Known(api=api, admin=_digests(keys.admin), tenants=keys.tenants.tenants)


def _digests(keys: Iterable[ApiKey]) -> dict[bytes, str]:
    return {hashlib.sha256(each.key.encode()).digest(): each.name for each in keys}


def _change(before: Mapping[Any, object], after: Mapping[Any, object]) -> Change:
    return Change(added=len(after.keys() - before.keys()), removed=len(before.keys() - after.keys()))


def _tenant_change(before: Iterable[TenantEntry], after: Iterable[TenantEntry]) -> TenantChange:
    old, new = ({each.name: each for each in tenants} for tenants in (before, after))
    changed = sum(old[name] != new[name] for name in old.keys() & new.keys())
    return TenantChange(**_change(old, new).model_dump(), changed=changed)

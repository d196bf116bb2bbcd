"""Who may see and do what is the operator's: a client with an admin key, or where there is none, one on this machine.

Promises: an ordinary API key opens nothing here; whatever came through a proxy or from another site's page does not
count as local; every path under `ADMIN_PATHS` is guarded, whether a route is there or not. Must not know: what the
routes do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.errors import ApiError, Forbidden, Unauthorized
from quire_server.http.guard import brought_keys, is_admin_path, is_key, send_error
from quire_server.http.hosts import is_loopback, names_this_machine
from quire_server.settings.keys import ApiKey

# Set by proxies: who has one of these was passed on by somebody, and the address is not the client's.
_PASSED_ON = frozenset(
    {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"}
)


class AdminAuth:
    """Lets through what is no admin path; asks for the key, or for a local client, where it is one."""

    def __init__(self, app: ASGIApp, *, keys: Iterable[ApiKey], root_path: str = "") -> None:
        self._app = app
        self._known = tuple((hashlib.sha256(key.key.encode()).digest(), key.name) for key in keys)
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_admin_path(scope["path"], self._root_path):
            refusal = self._refusal(scope)
            if refusal is not None:
                await send_error(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if not self._known:
            why = _why_not_local(scope)
            return None if why is None else Forbidden(f"This is for the operator: {why}; set --admin-api-key.")
        for key in brought_keys(scope["headers"]):
            for digest, name in self._known:
                if is_key(key, digest):
                    scope.setdefault("state", {}).update(key_name=name or "admin")
                    return None
        return Unauthorized()


def _why_not_local(scope: Scope) -> str | None:
    """Why the client is not one of this machine's own; None: it is."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if any(name in _PASSED_ON for name, _ in headers):
        return "the request came through a proxy, and no admin key is configured"
    client = scope.get("client")
    if client is not None and client[0] and not is_loopback(client[0]):
        return "the client is on another machine, and no admin key is configured"
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    # A page of another site, in a browser on this machine: it may have a name of its own for this address.
    if client is not None and client[0] and not (len(hosts) == 1 and names_this_machine(hosts[0])):
        return "the request names another host, and no admin key is configured"
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    sites = [value for name, value in headers if name == b"sec-fetch-site"]
    if any(origin.partition("://")[2] not in hosts for origin in origins) or b"cross-site" in sites:
        return "another site's page has sent the request, and no admin key is configured"
    return None

"""Which names a server answers to: against pages that have a name of their own for this machine's address.

A browser lets a page speak freely with the host that it came from. Whoever owns that host's name may let it point to
127.0.0.1 a moment later (DNS rebinding), and the page speaks with what listens here, without CORS and without a key.
What it cannot change is the Host header, which has the page's name.

Promises: a server that only this machine reaches and that asks for no key answers to this machine's names alone; with a
list of names every server answers to them, and to this machine's, alone; probes are answered under any name.
Must not know: routes, proxies.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.errors import HostNotAllowed
from quire_server.http.guard import send_error
from quire_server.settings import Settings

ANY = "*"
PROBES = frozenset({"/health", "/health/live", "/health/ready"})  # an orchestrator asks by the address of a pod


def checks_hosts(settings: Settings) -> bool:
    """Whether this server looks at the Host header at all."""
    if ANY in settings.allowed_hosts or settings.uds is not None:
        return False
    return bool(settings.allowed_hosts) or (not settings.needs_key and names_this_machine(settings.host))


class HostCheck:
    """Refuses requests for names neither this machine's nor among those allowed; `*.NAME` is all below NAME."""

    def __init__(self, app: ASGIApp, *, allowed: Collection[str], root_path: str = "") -> None:
        self._app = app
        lower = [name.lower() for name in allowed]
        self._names = frozenset(name for name in lower if not name.startswith("*."))
        self._endings = tuple(name.removeprefix("*") for name in lower if name.startswith("*."))
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].removeprefix(self._root_path) not in PROBES:
            for name, value in scope["headers"]:
                if name == b"host" and not self._is_ours(host := value.decode("latin-1")):
                    await send_error(_refusal(host), scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = bare_name(host).lower().removesuffix(".")
        return name in self._names or name.endswith(self._endings) or names_this_machine(host)


def _refusal(host: str) -> HostNotAllowed:
    return HostNotAllowed(
        f"This server does not answer to the host '{host[:96]}': a page of another site may have sent this. If the name"
        " is meant, start the server with --allowed-hosts and the name."
    )


def bare_name(host: str) -> str:
    """A Host header without its port; an IPv6 address without its brackets."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def names_this_machine(host: str) -> bool:
    """Whether a Host header is one that leads here from here only."""
    name = bare_name(host).lower().removesuffix(".")
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name) or is_loopback(host)


def is_loopback(address: str) -> bool:
    """Whether it is the numeric address of this machine, as this machine alone sees it."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback

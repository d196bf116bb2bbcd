"""The layers around an application: API keys, admin keys, CORS, and the check of the Host header."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire_server.errors import ApiError, Forbidden, HostNotAllowed, OriginNotAllowed, Unauthorized
from quire_server.http.body_limits import BodyBudget, BodyGate, BodyLimits
from quire_server.http.credentials import Credentials
from quire_server.http.guard import (
    Guard,
    KeyAuth,
    Reply,
    find_key,
    is_admin_path,
    send_error,
)
from quire_server.http.overload import OpenRequests, RefuseAtStop
from quire_server.settings import ServerLimits, Settings

Layer = Callable[[ASGIApp], ASGIApp]


def layers(
    settings: Settings,
    bodies: BodyLimits,
    on_body_bytes: Callable[[int], None] = lambda _: None,
    *,
    credentials: Credentials,
    limits: ServerLimits,
    on_reply: Callable[[Reply], None],
    requests: OpenRequests,
    explain: Callable[[str], str] | None = None,
) -> Iterator[Layer]:
    """Yield the layers from the innermost to the outermost; the serving and the starting application have the same.

    A request's body is not read before its size, its host and its key were checked. `on_body_bytes` is called with the
    number of held bytes of bodies. `explain`: in a line, the route of the request with this x-request-id; empty: none.
    """
    root = settings.root_path
    largest = 2 * bodies.largest  # while it is decoded, a body may be held a second time in its decoder's window
    budget = BodyBudget(max(limits.max_body_bytes_total, largest), on_body_bytes)
    yield partial(BodyGate, limits=bodies, budget=budget)  # the innermost: nothing of a body counts before the key
    admits_local = settings.allow_local_admin or not settings.needs_key
    if explain is not None:
        yield partial(RouteHeader, known=lambda: credentials.known.admin, admits_local=admits_local, explain=explain)
    yield partial(AdminAuth, known=lambda: credentials.known.admin, admits_local=admits_local, root_path=root)
    if settings.needs_key:  # inside of CORS, since preflights have no key
        yield partial(KeyAuth, known=lambda: credentials.known.api, root_path=root)
    cors: dict[str, Any] = {
        "allow_origins": settings.allowed_origins,
        "allow_methods": METHODS,
        "allow_headers": ("*",),  # SDKs send a dozen of their own
        "expose_headers": EXPOSED,
    }
    if settings.allowed_origins:
        yield partial(Preflights, **cors)
    if ANY not in settings.allowed_origins:
        yield partial(OriginCheck, allowed=settings.allowed_origins)
    if checks_hosts(settings):
        yield partial(HostCheck, allowed=settings.allowed_hosts, root_path=root)
    yield partial(RefuseAtStop, requests=requests)
    yield partial(Guard, limits=limits, bodies=bodies, budget=budget, on_reply=on_reply, root_path=root)
    if settings.allowed_origins:
        yield partial(CorsHeaders, **cors)


# Headers that proxies set: with one of these the address is not the client's.
_PASSED_ON = frozenset(
    {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"}
)


NO_ADMIN_KEY = (
    "This is for the operator, and the server has API keys but no admin key: start it with --admin-api-key KEY,"
    " --admin-api-key @FILE or QUIRE_ADMIN_API_KEY, or with --allow-local-admin to let clients on its machine in."
)


class AdminAuth:
    """Guards admin paths: they need an admin key, or, where none is set and `admits_local`, a client on this machine.

    An ordinary API key gives no access here. A request through a proxy or from another site's page is not local. Every
    path under `ADMIN_PATHS` is guarded, whether it has a route or not.
    """

    def __init__(
        self, app: ASGIApp, *, known: Callable[[], Mapping[bytes, str]], admits_local: bool = True, root_path: str = ""
    ) -> None:
        self._app = app
        self._known = known
        self._admits_local = admits_local
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_admin_path(scope["path"], self._root_path):
            refusal = self._refusal(scope)
            if refusal is not None:
                await send_error(refusal, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        known = self._known()
        refusal = _why_no_operator(scope, known, admits_local=self._admits_local)
        if refusal is None and known:
            key = find_key(scope["headers"], known)
            scope.setdefault("state", {}).update(key_name=(key[1] if key is not None else "") or "admin")
        return refusal


class RouteHeader:
    """Tells an operator which replica a request was given to, and why, in the header `x-quire-route` of the reply.

    A request asks for it by `x-quire-explain: route`, and needs a key or an address that admin paths would accept.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        known: Callable[[], Mapping[bytes, str]],
        admits_local: bool,
        explain: Callable[[str], str],
    ) -> None:
        self._app, self._known, self._admits_local, self._explain = app, known, admits_local, explain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_asked(scope):
            await self._app(scope, receive, send)
            return

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = self._explain(scope.get("state", {}).get("request_id", ""))
                if route:
                    MutableHeaders(scope=message)["x-quire-route"] = route
            await send(message)

        await self._app(scope, receive, tell)

    def _is_asked(self, scope: Scope) -> bool:
        asks = any(name == b"x-quire-explain" and value == b"route" for name, value in scope["headers"])
        return asks and _why_no_operator(scope, self._known(), admits_local=self._admits_local) is None


def is_operator(scope: Scope, credentials: Credentials, settings: Settings) -> bool:
    """Whether admin paths would accept the client of this request."""
    admits_local = settings.allow_local_admin or not settings.needs_key
    return _why_no_operator(scope, credentials.known.admin, admits_local=admits_local) is None


def _why_no_operator(scope: Scope, known: Mapping[bytes, str], *, admits_local: bool) -> ApiError | None:
    """The refusal of an operator's request; None: it is one. `known`: the admin keys."""
    if known:
        return None if find_key(scope["headers"], known) is not None else Unauthorized()
    if not admits_local:
        return Forbidden(NO_ADMIN_KEY)
    why = _why_not_local(scope)
    return None if why is None else Forbidden(f"This is for the operator: {why}; set --admin-api-key.")


def _why_not_local(scope: Scope) -> str | None:
    """Why the client is not on this machine; None if it is."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    if any(name in _PASSED_ON for name, _ in headers):
        return "the request came through a proxy, and no admin key is configured"
    client = scope.get("client")
    if client is not None and client[0] and not is_loopback(client[0]):
        return "the client is on another machine, and no admin key is configured"
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    # A page of another site in a browser on this machine may use its own host name for this address.
    if client is not None and client[0] and not (len(hosts) == 1 and names_this_machine(hosts[0])):
        return "the request names another host, and no admin key is configured"
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    sites = [value for name, value in headers if name == b"sec-fetch-site"]
    if any(origin.partition("://")[2] not in hosts for origin in origins) or b"cross-site" in sites:
        return "another site's page has sent the request, and no admin key is configured"
    return None


ANY = "*"
# Orchestrators use the address of a pod as the host.
PROBES = frozenset({"/health", "/health/live", "/health/ready", "/ping"})


def checks_hosts(settings: Settings) -> bool:
    """Whether this server checks the Host header.

    It does with a list of allowed hosts, and if it listens on loopback without a key.
    """
    if ANY in settings.allowed_hosts or settings.uds is not None:
        return False
    return bool(settings.allowed_hosts) or (not settings.needs_key and names_this_machine(settings.host))


class HostCheck:
    """Refuses requests for host names that are neither this machine's nor allowed; `*.NAME` is any name below NAME.

    A browser lets a page send requests to the host that it came from. The owner of that host's name may let it resolve
    to 127.0.0.1 a moment later (DNS rebinding); then the page can talk to this server, without CORS and without a key.
    The owner cannot change the Host header, which has the page's name.
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str], root_path: str = "") -> None:
        self._app = app
        lower = [name.lower() for name in allowed]
        self._names = frozenset(name for name in lower if not name.startswith("*."))
        self._endings = tuple(name.removeprefix("*") for name in lower if name.startswith("*."))
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].removeprefix(self._root_path) not in PROBES:
            host = self.foreign(scope["headers"])
            if host is not None:
                await send_error(_refusal(host), scope, receive, send)
                return
        await self._app(scope, receive, send)

    def foreign(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """The first host in a head that is not this server's; None: all are."""
        hosts = (value.decode("latin-1") for name, value in headers if name == b"host")
        return next((host for host in hosts if not self._is_ours(host)), None)

    def _is_ours(self, host: str) -> bool:
        name = bare_name(host).lower().removesuffix(".")
        return name in self._names or name.endswith(self._endings) or names_this_machine(host)


def _refusal(host: str) -> HostNotAllowed:
    return HostNotAllowed(
        f"This server does not answer to the host '{host[:96]}': a page of another site may have sent this. If the name"
        " is meant, start the server with --allowed-hosts and the name."
    )


_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_WEB = ("http", "https")


class OriginCheck:
    """Refuses requests that another site's page lets a browser send, unless they only read.

    A browser sends a form of any page to any address, without CORS and without asking: what it may not do is read the
    reply. It names the page's site in `Origin`, and newer ones say in `Sec-Fetch-Site` how that is related to ours. No
    page can change either, nor add an API key or `X-Forwarded-Host` without a preflight, which is not granted. Requests
    of programs have neither header, those of extensions and desktop programs an origin that is no web site.
    """

    def __init__(self, app: ASGIApp, *, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(origin.lower().encode() for origin in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in _READING and self.is_foreign(scope["headers"]):
            await send_error(
                OriginNotAllowed(
                    "Another site's page has sent this. If the site is meant, start the server with --allowed-origins"
                    " and its origin; behind a proxy let that pass the Host header on."
                ),
                scope,
                receive,
                send,
            )
            return
        await self._app(scope, receive, send)

    def is_foreign(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a page of a site that is neither ours nor allowed has sent a request with this head."""
        found: dict[bytes, list[bytes]] = {}
        for name, value in headers:
            found.setdefault(name, []).append(value.strip().lower())
        origins, sites = found.get(b"origin", []), found.get(b"sec-fetch-site", [])
        if not origins and not sites:
            return False
        bearer = any(value.startswith(b"bearer ") for value in found.get(b"authorization", []))
        if bearer or b"x-api-key" in found or (origins and self._allowed.issuperset(origins)):
            return False
        if sites in ([b"same-origin"], [b"none"]):  # true also where a proxy has put another host
            return False
        ours = {host.partition(b",")[0].strip() for name in _HOSTS for host in found.get(name, [])}
        return not origins or not all(_is_ours(origin, ours) for origin in origins)


_HOSTS = (b"host", b"x-forwarded-host")


def _is_ours(origin: bytes, hosts: Collection[bytes]) -> bool:
    """Whether an origin is that of a page from one of these hosts, or of no web page at all."""
    scheme, separator, place = origin.partition(b"://")
    if not separator:
        return False  # null: a page in a sandbox, which any page can make
    if scheme.decode("latin-1") not in _WEB:
        return True
    port = b":443" if scheme == b"https" else b":80"
    return place.removesuffix(port) in {host.removesuffix(port) for host in hosts}


def bare_name(host: str) -> str:
    """A Host header without its port, and an IPv6 address without its brackets."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def names_this_machine(host: str) -> bool:
    """Whether a Host header always means this machine."""
    name = bare_name(host).lower().removesuffix(".")
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name) or is_loopback(host)


def is_loopback(address: str) -> bool:
    """Whether the text is a numeric loopback address."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


METHODS = ("GET", "POST", "DELETE")
EXPOSED = (
    *("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry"),
    *("x-quire-ignored", "x-quire-clamped", "x-quire-notes", "x-quire-adapter", "x-quire-route"),
)


def _is_preflight(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    headers = Headers(scope=scope)
    return "origin" in headers and "access-control-request-method" in headers


class CorsHeaders(CORSMiddleware):
    """The outer layer of CORS: adds its headers to every reply, so that a page can read why it was refused."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_preflight(scope):  # a preflight's reply has its own headers
            await self.app(scope, receive, send)
        else:
            await self.simple_response(scope, receive, send, request_headers=Headers(scope=scope))


class Preflights(CORSMiddleware):
    """The inner layer of CORS: answers preflights after limits and hosts, before keys, which they do not have."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_preflight(scope):
            await self.preflight_response(request_headers=Headers(scope=scope))(scope, receive, send)
        else:
            await self.app(scope, receive, send)

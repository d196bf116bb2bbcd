"""What stands around an application, in its order: the same around the one that serves and the one that only starts.

Promises: nothing of a request is looked at before its size, its host and its key were, and no layer is forgotten for a
moment. Must not know: what the application does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from quire_server.http.admin import AdminAuth
from quire_server.http.body_limits import BodyBudget, BodyGate, BodyLimits
from quire_server.http.cors import EXPOSED, METHODS, CorsHeaders, Preflights
from quire_server.http.guard import Guard, KeyAuth, Reply, RequestLimits
from quire_server.http.hosts import HostCheck, checks_hosts
from quire_server.http.unanswered import LastWord, OpenRequests
from quire_server.settings import Settings

Layer = Callable[[ASGIApp], ASGIApp]


def layers(
    settings: Settings,
    bodies: BodyLimits,
    on_body_bytes: Callable[[int], None] = lambda _: None,
    *,
    on_reply: Callable[[Reply], None],
    requests: OpenRequests,
) -> Iterator[Layer]:
    """From the innermost to the outermost. `on_body_bytes` is told how many bytes of bodies are held."""
    root = settings.root_path
    budget = BodyBudget(max(settings.max_body_bytes_total, bodies.largest), on_body_bytes)
    yield partial(BodyGate, limits=bodies, budget=budget)  # the innermost: nothing of a body counts before the key
    yield partial(AdminAuth, keys=settings.admin_keys, root_path=root)
    if settings.needs_key:  # among the innermost: preflights carry no key
        yield partial(KeyAuth, keys=settings.keys, tenants=settings.tenant_list, root_path=root)
    cors: dict[str, Any] = {
        "allow_origins": settings.allowed_origins,
        "allow_methods": METHODS,
        "allow_headers": ("*",),  # SDKs bring a dozen of their own
        "expose_headers": EXPOSED,
    }
    if settings.allowed_origins:
        yield partial(Preflights, **cors)
    if checks_hosts(settings):
        yield partial(HostCheck, allowed=settings.allowed_hosts, root_path=root)
    yield partial(LastWord, requests=requests)
    limits = RequestLimits(
        max_header_bytes=settings.max_header_bytes,
        max_headers=settings.max_headers,
        body_timeout=settings.body_timeout,
    )
    yield partial(Guard, limits=limits, bodies=bodies, budget=budget, on_reply=on_reply, root_path=root)
    if settings.allowed_origins:
        yield partial(CorsHeaders, **cors)

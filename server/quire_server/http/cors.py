"""CORS in two layers: every reply gets its headers, whoever made it; preflights are answered before keys are asked for.

Promises: a page of an allowed origin can read why it was refused, by whatever part of the server; caches keep replies
to different origins apart. Must not know: routes, keys, what the replies say.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

METHODS = ("GET", "POST", "DELETE")
EXPOSED = (
    *("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry"),
    *("x-quire-ignored", "x-quire-clamped", "x-quire-notes"),
)


def _is_preflight(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    headers = Headers(scope=scope)
    return "origin" in headers and "access-control-request-method" in headers


class CorsHeaders(CORSMiddleware):
    """The outer layer: around all that makes replies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_preflight(scope):  # a preflight's reply has its own headers
            await self.app(scope, receive, send)
        else:
            await self.simple_response(scope, receive, send, request_headers=Headers(scope=scope))


class Preflights(CORSMiddleware):
    """The inner layer: behind limits and hosts, before keys, which a preflight does not carry."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_preflight(scope):
            await self.preflight_response(request_headers=Headers(scope=scope))(scope, receive, send)
        else:
            await self.app(scope, receive, send)

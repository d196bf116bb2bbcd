"""Requests that the server makes to its own application: the lines of batches, in the names of their owners.

Promises: such a request passes every layer and every check that a client's passes, except that it brings no key but the
digest of one; no client can make a request that looks like one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope

_VOUCHED = "quire.vouched"  # of a scope, which the listener makes without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouched:
    """The client in whose name the server asks: the digest of its key, empty on a server without keys."""

    key_digest: str = ""

    def key(self, known: Mapping[bytes, str]) -> tuple[bytes, str] | None:
        """The digest and the name of the key; None: it does not hold any more."""
        digest = bytes.fromhex(self.key_digest)
        return (digest, known[digest]) if digest in known else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnReply:
    """A whole reply; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def vouched_for(scope: Scope) -> Vouched | None:
    """The client in whose name the server itself has made this request; None: a client has made it."""
    vouched = scope.get(_VOUCHED)
    return vouched if isinstance(vouched, Vouched) else None


async def ask_own(app: ASGIApp, path: str, body: bytes, vouched: Vouched) -> OwnReply:
    """POST a JSON body to the application. When the caller is cancelled, so is the request's work."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ],
        "client": None,
        "server": None,
        "state": {},
        _VOUCHED: vouched,
    }
    parts: list[bytes] = []
    start: Message = {}
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # until the caller of `receive` is cancelled: this client does not leave
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
    return OwnReply(status=start["status"], headers=headers, body=b"".join(parts))

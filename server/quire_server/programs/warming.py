"""Prefixes from a file, computed before the server is ready, so that the first requests find them in the prefix cache.

Promises: a prefix is computed as a client's request of the same words would be, in the name of those who may find it;
a wrong file ends the start with a line that names its place. Must not know: the engine.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire_engine.contract.errors import ConfigError
from quire_engine.plain_files import read_plain
from quire_server.http.own_requests import OwnReply, Vouched, ask_own

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from quire_server.state import ServerState

MAX_BYTES = 64 << 20  # of the file, which is held in memory
_ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
_FOR = "for"

log = logging.getLogger("quire.warming")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPrefix:
    """One line of the file."""

    line: int  # from 1
    route: str
    body: bytes  # of the request that computes the prefix
    owner: str | None  # the tenant or the named key that may find it; None: all


def read_prefixes(path: Path) -> list[WarmPrefix]:
    """The lines of a file. Raises ConfigError."""
    where = f"--warm-prefix {path}"
    try:
        raw = read_plain(path, MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
    lines = [(number, line) for number, line in enumerate(raw.splitlines(), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{where}: has no prefix")
    return [_prefix(line, number, f"{where}, line {number}") for number, line in lines]


def _prefix(line: bytes, number: int, where: str) -> WarmPrefix:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: is no JSON object")
    kinds = [kind for kind in _ROUTES if kind in fields]
    if len(kinds) != 1:
        raise ConfigError(f"{where}: needs either 'messages', as a chat has them, or a 'prompt'")
    owner = fields.pop(_FOR, None)
    if owner is not None and not isinstance(owner, str):
        raise ConfigError(f"{where}: '{_FOR}' is the name of a tenant or of a key")
    if kinds[0] == "messages":
        fields.setdefault("add_generation_prompt", False)  # what follows the prefix in each request is another
    body = fields | {"max_tokens": 1, "stream": False}
    return WarmPrefix(line=number, route=_ROUTES[kinds[0]], body=msgspec.json.encode(body), owner=owner)


async def warm(state: ServerState, app: ASGIApp, path: Path) -> None:
    """Compute the prefixes of a file, one after the other. Raises ConfigError for those that the server refuses."""
    if not state.settings.enable_prefix_caching:
        raise ConfigError("--warm-prefix needs the prefix cache, which --set enable_prefix_caching=false turns off")
    started, prefixes, computed, cached, lost = time.monotonic(), read_prefixes(path), 0, 0, 0
    log.info("computing %d prefixes of %s", len(prefixes), path)
    for prefix in prefixes:
        for vouched in _owners(state, prefix, path):
            reply = await ask_own(app, state.settings.root_path + prefix.route, prefix.body, vouched)
            told: dict[str, Any] = msgspec.json.decode(reply.body)
            if reply.status == 200:
                hits = told["usage"]["prompt_tokens_details"]["cached_tokens"]
                computed, cached = computed + told["usage"]["prompt_tokens"] - hits, cached + hits
            else:
                _complain(reply, told["error"]["message"], f"--warm-prefix {path}, line {prefix.line}")
                lost += 1
    seconds = time.monotonic() - started
    log.info(
        "prefixes: %d tokens computed, %d were cached, %d requests failed, %.1f s", computed, cached, lost, seconds
    )


def _complain(reply: OwnReply, message: str, where: str) -> None:
    """Raises ConfigError where the file is to blame; else the server starts without the prefix."""
    if 400 <= reply.status < 500 and reply.status != 429:
        raise ConfigError(f"{where}: {message}")
    log.warning("%s: not computed: %s", where, message)


def _owners(state: ServerState, prefix: WarmPrefix, path: Path) -> list[Vouched]:
    """Return the owners for whom a prefix is computed: no client finds another's prefixes. Raises ConfigError."""
    if not state.settings.needs_key:
        if prefix.owner is not None:
            raise ConfigError(
                f"--warm-prefix {path}, line {prefix.line}: '{_FOR}' names a tenant or a key, and this server has none"
            )
        return [Vouched()]
    found: dict[str, bytes] = {}  # one key of each name
    for digest, name in state.credentials.known.api.items():
        if prefix.owner in (None, name):
            found.setdefault(name or digest.hex(), digest)
    if not found:
        raise ConfigError(f"--warm-prefix {path}, line {prefix.line}: no tenant or key has the name '{prefix.owner}'")
    return [Vouched(key_digest=digest.hex()) for digest in found.values()]

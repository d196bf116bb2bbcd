"""Who gets in without a key: foreign names on a loopback server, and every route with every method.

Promises: what is open is what the documents say. Must not know: how it is checked.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from urllib.parse import urlsplit

from e2e.served import Served
from hostile.row import Row

KEY = "sk-hostile-0123456789"
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "PATCH")
PAGES = (
    "/",
    "/docs",
    "/dashboard",
    "/learn",
    "/pages/page.css",
    "/pages/icon.svg",
    "/pages/session.js",
    "/pages/chat.js",
)
PAGES_MORE = ("/pages/docs.js", "/pages/dashboard.css", "/pages/dashboard.js", "/pages/charts.js", "/pages/requests.js")
PUBLIC = {"/health", "/health/live", "/health/ready", "/ping", "/load", "/version", "/metrics", *PAGES, *PAGES_MORE}
# For the operator, with all paths below them; see docs/api.md.
ADMIN = (
    *("/debug", "/admin", "/dashboard/events", "/learn/events", "/learn/exercises"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
FOREIGN = (
    *(
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "notlocalhost",
        "0.0.0.0",
    ),
    *("10.0.0.7", "192.168.1.5:8000", "[2001:db8::1]:80", "evil.example#localhost", "localhost@evil.example"),
)


async def ask(server: Served, method: str, path: str, *headers: str, host: str = "") -> tuple[int, bytes]:
    """The status and the whole reply of one request, as written."""
    parts = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    lines = (f"{method} {path} HTTP/1.1", f"Host: {host or parts.netloc}", "Connection: close", *headers, "", "")
    writer.write("\r\n".join(lines).encode())
    try:
        raw = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    return int(raw.split(b" ", 2)[1]) if raw else 0, raw


async def foreign_hosts(server: Served) -> str:
    counts: Counter[int] = Counter()
    for host, path in itertools.product(FOREIGN, ("/v1/models", "/metrics", "/openapi.json", "/admin/drain", "/")):
        status, raw = await ask(server, "GET", path, host=host)
        counts[status] += 1
        assert status in {400, 403}, f"{path} under {host}: {status}"
        assert b"quire-demo" not in raw
    for host in ("localhost", "127.0.0.1:1", "[::1]", "quire.localhost"):
        assert (await ask(server, "GET", "/v1/models", host=host))[0] == 200, host
    assert (await ask(server, "GET", "/health/ready", host="10.1.2.3:8000"))[0] == 200
    told = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    return f"{told}; this machine's names 200; a probe by address 200"


async def matrix(server: Served) -> str:
    key = f"Authorization: Bearer {KEY}"
    status, raw = await ask(server, "GET", "/openapi.json", key)
    assert status == 200
    body = raw.partition(b"\r\n\r\n")[2]
    paths = [path.replace("{", "").replace("}", "") for path in json.loads(body)["paths"]]
    counts: Counter[str] = Counter()
    for path, method in itertools.product([*paths, *PUBLIC, "/openapi.json", "/nothing", "/v1", "/llm"], METHODS):
        for name, headers in (("without", ()), ("wrong", (f"Authorization: Bearer {KEY[:-1]}",))):
            status, reply = await ask(server, method, path, *headers)
            counts[f"{name} {status}"] += 1
            if path in PUBLIC:
                assert status in {200, 405}, f"{name} key: {method} {path}: {status}"
            elif path.startswith(ADMIN):
                # No admin key is set beside the API key, so they are for none, also on this machine.
                assert status == 403, f"{name} key: {method} {path}: {status}"
            else:
                assert status == 401, f"{name} key: {method} {path}: {status}"
                assert b"quire-demo" not in reply
    return f"{len(paths)} paths x {len(METHODS)} methods: " + ", ".join(f"{n} {w}" for w, n in sorted(counts.items()))


ROWS = (
    Row(name="foreign-host", what="Host: a foreign name, no key", act=foreign_hosts, flags=("--kv-memory", "64MiB")),
    Row(
        name="routes-without-key",
        what="every route with every method, without a key and with a wrong one",
        act=matrix,
        flags=("--kv-memory", "64MiB", "--api-key", KEY),
    ),
)

"""Files and batches of one client against all others: wrong batches, bytes without end, pages of other sites.

Promises: the server's folder is an empty one of its own. Must not know: other rows.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from e2e.served import Served
from hostile.row import Row
from hostile.two_tenants import ATTACKER, KEYS, VICTIM
from support.batches import ENDED, begin, content_of, line, lines_of, upload

BATCH_DIR = ("--batch-dir", "kept")
WRONG, WRONG_LINES, LINES, MOST_SECONDS = 95, 20_000, 300, 120.0
QUOTA, UPLOADS, UPLOAD_BYTES = 2 << 20, 15, 5 << 18
LONG_LINES, REFUSED_LINES = 60, 4_000
SMALL_DATABASE = 1 << 20  # bytes, of one without lines
_FOREIGN = (
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://127.0.0.1:9", "sec-fetch-site": "same-site"},
)
_BOUNDARY = "boundary-of-the-form"


def _client(server: Served, key: str = "") -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=120, headers={"x-api-key": key} if key else None)


def _kept(server: Served) -> Path:
    return Path(psutil.Process(server.process.pid).cwd()) / BATCH_DIR[1]


def _bytes_of(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):  # of an upload that has just been refused
            total += path.stat().st_size
    return total


async def _ended(http: httpx.AsyncClient, batch: dict[str, Any], seconds: float = MOST_SECONDS) -> dict[str, Any]:
    async with asyncio.timeout(seconds):
        while True:
            now: dict[str, Any] = (await http.get(f"/v1/batches/{batch['id']}")).json()
            if now["status"] in ENDED:
                return now
            await asyncio.sleep(0.1)


async def wrong_batches(server: Served) -> str:
    """Batches of one client over a large wrong file: another's lines run before all of these are checked."""
    wrong = lines_of(*(line(f"l{n}") for n in range(WRONG_LINES)), line("l0"))
    async with _client(server, ATTACKER) as attacker, _client(server, VICTIM) as victim:
        first = await begin(attacker, wrong)
        asked = {"input_file_id": first["input_file_id"], "endpoint": first["endpoint"], "completion_window": "24h"}
        for _ in range(WRONG - 1):
            (await attacker.post("/v1/batches", json=asked)).raise_for_status()
        started = time.monotonic()
        batch = await _ended(victim, await begin(victim, [line(f"l{n}", max_tokens=1) for n in range(LINES)]))
        took = time.monotonic() - started
        states = [each["status"] for each in (await attacker.get("/v1/batches?limit=100")).json()["data"]]
    left = states.count("validating")
    assert batch["request_counts"]["completed"] == LINES, batch["request_counts"]
    assert left, f"the lines waited for all {WRONG} checks, {took:.1f} s"
    return f"{LINES} of {LINES} lines of another in {took:.1f} s, while {left} of {WRONG} wrong files were unchecked"


async def _begin_upload(server: Served) -> asyncio.StreamWriter:
    """Send most of a file, and leave the form open."""
    address = urlsplit(server.url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    head = f"POST /v1/files HTTP/1.1\r\nHost: {address.netloc}\r\nTransfer-Encoding: chunked\r\n"
    head += f"Content-Type: multipart/form-data; boundary={_BOUNDARY}\r\n\r\n"
    part = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
    body = part + bytes(UPLOAD_BYTES)
    writer.write(head.encode() + f"{len(body):x}\r\n".encode() + body + b"\r\n")
    return writer


async def _under_way(server: Served) -> int:
    """The most bytes on the disk while so many uploads are under way."""
    files, most = _kept(server) / "files", 0
    writers = await asyncio.gather(*(_begin_upload(server) for _ in range(UPLOADS)))
    for _ in range(20):
        most = max(most, _bytes_of(files.iterdir()))
        await asyncio.sleep(0.1)
    for writer in writers:
        writer.close()
    async with asyncio.timeout(MOST_SECONDS):
        while any(files.iterdir()):  # noqa: ASYNC110  # the server notices by itself
            await asyncio.sleep(0.05)
    return most


async def quota(server: Served) -> str:
    """Uploads that never end, outputs and errors without end: no more bytes than one client may have."""
    files, database = _kept(server) / "files", _kept(server) / "batches.sqlite"
    under_way = await _under_way(server)
    assert 0 < under_way <= QUOTA, f"{under_way} bytes of uploads under way, {QUOTA} may be"
    async with _client(server) as http:
        refused = await _ended(http, await begin(http, [line(f"l{n}") for n in range(REFUSED_LINES)]))
        assert refused["status"] == "failed", refused
        assert refused["errors"]["data"][0]["code"] == "file_quota_exceeded", refused["errors"]
        assert (await http.delete(f"/v1/files/{refused['input_file_id']}")).status_code == 200
        prompt = list(range(20, 320))  # whose log-probabilities are a hundred times as long
        long = [line(f"l{n}", prompt=prompt, echo=True, logprobs=5, max_tokens=1) for n in range(LONG_LINES)]
        batch = await _ended(http, await begin(http, long))
        counts, kept = batch["request_counts"], _bytes_of(files.iterdir())
        assert kept <= QUOTA, f"{kept} bytes of files, {QUOTA} may be"
        assert min(counts["completed"], counts["failed"]) > 0, f"{counts}, {kept} bytes of files"
        (error, *_) = await content_of(http, batch["error_file_id"])
        assert error["error"]["code"] == "file_quota_exceeded", error
        for file in (await http.get("/v1/files")).json()["data"]:
            (await http.delete(f"/v1/files/{file['id']}")).raise_for_status()
        async with asyncio.timeout(MOST_SECONDS):
            while database.stat().st_size > SMALL_DATABASE:  # noqa: ASYNC110  # it shrinks in each round
                await asyncio.sleep(0.1)
        left = _bytes_of(files.iterdir())
    assert not left, f"{left} bytes are left after all files were deleted"
    return (
        f"{under_way >> 10} KiB of {UPLOADS * UPLOAD_BYTES >> 10} under way, {counts['completed']} answers with"
        f" {kept >> 10} KiB and {counts['failed']} refusals, of {QUOTA >> 10}; all given back"
    )


async def foreign_pages(server: Served) -> str:
    """A page of another site posts to every route of a server without keys."""
    changing, form = 0, {"files": {"file": ("in.jsonl", b"x")}, "data": {"purpose": "batch"}}
    async with _client(server) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
        for path, methods in paths.items():
            for method in sorted({"post", "put", "patch", "delete"} & methods.keys()):
                changing += 1
                for headers in _FOREIGN:
                    more: dict[str, Any] = form if path == "/v1/files" else {}
                    reply = await http.request(method, path, headers=headers, **more)
                    assert reply.status_code == 403, f"{method} {path} with {headers}: {reply.status_code}"
        assert not any((_kept(server) / "files").iterdir())
        assert (await upload(http, b"x")).status_code == 200, "a program without such headers may"
        told = json.loads((await http.post("/v1/files", headers=_FOREIGN[0], **form)).text)
        assert told["error"]["code"] == "origin_not_allowed", told
    return f"{len(_FOREIGN) * changing} of {len(_FOREIGN) * changing} refused, on {changing} routes"


ROWS = (
    Row(
        name="wrong-batches",
        what=f"{WRONG} wrong batches of one key",
        act=wrong_batches,
        flags=(*KEYS, *BATCH_DIR),
        has_folder=True,
    ),
    Row(
        name="file-quota",
        what="uploads, answers and errors without end",
        act=quota,
        flags=BATCH_DIR,
        limits=f"max_files_bytes={QUOTA}",
        has_folder=True,
    ),
    Row(
        name="foreign-pages",
        what="forms that pages of other sites post",
        act=foreign_pages,
        flags=(*BATCH_DIR, "--allow-local-admin"),
        has_folder=True,
    ),
)

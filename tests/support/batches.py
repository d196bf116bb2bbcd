"""An app with batches, its runner at work, and what clients do with both.

Must not know: the modules under test beyond the app.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from support.fakes import connect, make_app

COMPLETIONS = "/v1/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "a", "max_tokens": 4, **body}}


def lines_of(*lines: Mapping[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@contextlib.asynccontextmanager
async def batching(folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app with a folder for batches. On leaving, the app ends."""
    headers = options.pop("headers", None)
    app = make_app(batch_dir=folder, **options)
    async with app.router.lifespan_context(app), connect(app, headers=headers) as client:
        yield client


async def upload(client: httpx.AsyncClient, content: bytes, **fields: str) -> httpx.Response:
    fields = {"purpose": "batch", **fields}
    return await client.post("/v1/files", files={"file": ("in.jsonl", content)}, data=fields)


async def begin(
    client: httpx.AsyncClient, lines: Sequence[Mapping[str, Any]] | bytes, endpoint: str = COMPLETIONS, **fields: Any
) -> dict[str, Any]:
    """The new batch over these lines, or over the bytes of a file."""
    content = lines if isinstance(lines, bytes) else lines_of(*lines)
    uploaded = await upload(client, content)
    assert uploaded.status_code == 200, uploaded.text
    asked = {"input_file_id": uploaded.json()["id"], "endpoint": endpoint, "completion_window": "24h", **fields}
    reply = await client.post("/v1/batches", json=asked)
    assert reply.status_code == 200, reply.text
    batch: dict[str, Any] = reply.json()
    assert batch["status"] == "validating"
    return batch


async def ended(client: httpx.AsyncClient, batch: Mapping[str, Any], *, patience: float = 300.0) -> dict[str, Any]:
    """The batch when it has ended."""
    async with asyncio.timeout(patience):
        while True:
            now: dict[str, Any] = (await client.get(f"/v1/batches/{batch['id']}")).json()
            if now["status"] in ENDED:
                return now
            await asyncio.sleep(0.02)


async def until(condition: Callable[[], bool], *, patience: float = 300.0) -> None:
    async with asyncio.timeout(patience):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.01)


async def has_completed(client: httpx.AsyncClient, batch: Mapping[str, Any], number: int) -> None:
    """Wait until so many lines of a batch that goes on are answered."""
    async with asyncio.timeout(300):
        while True:
            now = (await client.get(f"/v1/batches/{batch['id']}")).json()
            if now["request_counts"]["completed"] >= number:
                assert now["status"] == "in_progress"
                return
            await asyncio.sleep(0.01)


async def shows(client: httpx.AsyncClient, sample: str) -> None:
    """Wait until /metrics has this sample."""
    async with asyncio.timeout(300):
        while sample not in (await client.get("/metrics")).text:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.02)


async def content_of(client: httpx.AsyncClient, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output file; none where there is no file."""
    if file_id is None:
        return []
    reply = await client.get(f"/v1/files/{file_id}/content")
    assert reply.status_code == 200
    return [json.loads(each) for each in reply.text.splitlines()]

"""Two tenants on a real server: shares by weight while both ask for more than there is, and a deadline."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from pathlib import Path

import httpx
import pytest
import yaml

from e2e.served import Served

pytestmark = pytest.mark.e2e

KEYS = {"light": "key-of-light", "heavy": "key-of-heavy"}
SERVICE = {"prompt": 1, "output": 2}  # of a token
PROMPT, OUTPUT = 24, 32  # tokens of a request
REQUESTS = 300  # of each tenant, sent ahead: their shares do not depend on when this process gets time
EACH = PROMPT * SERVICE["prompt"] + OUTPUT * SERVICE["output"]
MEASURED = 15_000  # service in which the shares are measured
SEATS = 8
TRIES = 20  # of a busy host, which may look when the heavy tenant has no requests left


@pytest.fixture
def file(tmp_path: Path) -> Path:
    entries = [
        {"name": name, "key_sha256": hashlib.sha256(key.encode()).hexdigest(), "weight": weight}
        for (name, key), weight in zip(KEYS.items(), (1, 2), strict=True)
    ]
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": entries}))
    return path


async def ask(client: httpx.AsyncClient, tenant: str, **fields: object) -> httpx.Response:
    prompt = [random.randrange(20, 400) for _ in range(PROMPT)]
    body = {"prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True} | fields
    return await client.post("/v1/completions", json=body, headers={"x-api-key": KEYS[tenant]})


async def service(client: httpx.AsyncClient) -> dict[str, float]:
    """What each tenant has got, of the metrics."""
    text = (await client.get("/metrics")).text
    got = dict.fromkeys(KEYS, 0.0)
    for kind, tenant, value in re.findall(r'quire_tenant_tokens_total{kind="(\w+)".*tenant="(\w+)"} (\S+)', text):
        got[tenant] += SERVICE[kind] * float(value)
    return got


async def shares(server: Served) -> float | None:
    """How many times as much the heavy tenant got as the light one while both had requests waiting. None: too late."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        start = await service(client)

        async def got() -> tuple[dict[str, float], float]:
            """Service of each tenant since the start, and of both."""
            now = await service(client)
            gained = {tenant: now[tenant] - start[tenant] for tenant in KEYS}
            return gained, sum(gained.values())

        asking = [asyncio.create_task(ask(client, tenant)) for _ in range(REQUESTS) for tenant in KEYS]
        before, done = await got()
        while server.metric("quire_requests_waiting") + done / EACH + 2 * SEATS < len(asking):  # until all are there
            await asyncio.sleep(0.02)
            before, done = await got()
        late = await ask(client, "heavy", timeout=0.2, max_tokens=400)
        after, now = await got()
        while now < done + MEASURED and not all(task.done() for task in asking):
            await asyncio.sleep(0.05)
            after, now = await got()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.to_thread(server.wait_idle)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    gained = {tenant: after[tenant] - before[tenant] for tenant in KEYS}
    print(f"service while both waited: {gained}")
    return None if after["heavy"] > 0.9 * REQUESTS * EACH else gained["heavy"] / gained["light"]


def test_two_tenants_get_what_they_are_worth(file: Path) -> None:
    with Served(
        *("--tenants", str(file), "--scheduling-policy", "wfq", "--max-num-seqs", str(SEATS)),
        *("--set", "enable_prefix_caching=false", "--set", "check_invariants=true"),
        *("--max-num-queued-reqs", "4096", "--max-connections", "4096"),
    ) as server:
        ratio = next(found for _ in range(TRIES) if (found := asyncio.run(shares(server))) is not None)
    assert ratio == pytest.approx(2.0, rel=0.05)

"""Two tenants on a real server: shares by weight while both ask for more than there is, and a deadline."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from pathlib import Path

import httpx
import pytest
import yaml

from e2e.served import Served

pytestmark = pytest.mark.e2e

KEYS = {"light": "key-of-light", "heavy": "key-of-heavy"}
SECONDS = 4.0
CLIENTS = 48  # of each tenant: its line lasts half a second, in which this process may get no time of a busy host
SERVICE = {"prompt": 1, "output": 2}  # of a token


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
    body = {"prompt": [random.randrange(20, 400) for _ in range(24)], "max_tokens": 32, "ignore_eos": True} | fields
    return await client.post("/v1/completions", json=body, headers={"x-api-key": KEYS[tenant]})


async def keep_asking(client: httpx.AsyncClient, tenant: str) -> None:
    while True:
        assert (await ask(client, tenant)).status_code == 200


async def service(client: httpx.AsyncClient) -> dict[str, float]:
    """What each tenant has got, of the metrics."""
    text = (await client.get("/metrics")).text
    got = dict.fromkeys(KEYS, 0.0)
    for kind, tenant, value in re.findall(r'quire_tenant_tokens_total{kind="(\w+)".*tenant="(\w+)"} (\S+)', text):
        got[tenant] += SERVICE[kind] * float(value)
    return got


async def shares(url: str) -> float:
    """How many times as much the heavy tenant got as the light one, which had as many requests waiting."""
    limits = httpx.Limits(max_connections=2 * CLIENTS + 4)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        asking = [asyncio.create_task(keep_asking(client, tenant)) for tenant in KEYS for _ in range(CLIENTS)]
        await asyncio.sleep(1.0)
        before = await service(client)
        await asyncio.sleep(SECONDS)
        after = await service(client)
        late = await ask(client, "heavy", timeout=0.2, max_tokens=400)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
    gained = {tenant: after[tenant] - before[tenant] for tenant in KEYS}
    print(f"service in {SECONDS:g} s: {gained}")
    return gained["heavy"] / gained["light"]


def test_two_tenants_get_what_they_are_worth(file: Path) -> None:
    with Served(
        *("--tenants", str(file), "--scheduling-policy", "wfq", "--max-num-seqs", "8"),
        *("--set", "enable_prefix_caching=false", "--set", "check_invariants=true"),
    ) as server:
        ratio = asyncio.run(shares(server.url))
    assert ratio == pytest.approx(2.0, rel=0.05)


def cached(server: Served, key: str, **fields: object) -> int:
    body = {"prompt": list(range(20, 84)), "max_tokens": 1, "model": "quire-demo"} | fields
    answer = httpx.post(server.url + "/v1/completions", json=body, headers={"x-api-key": key}, timeout=60)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_no_key_finds_the_prefixes_of_another() -> None:
    with Served("--api-key", "one", "two") as server:
        assert [cached(server, "one"), cached(server, "one")] == [0, 63]
        assert [cached(server, "two"), cached(server, "two")] == [0, 63]
        assert cached(server, "one", cache_salt="mine") == 0
        assert cached(server, "two", cache_salt="mine") == 0, "nor by a salt that it has copied"
        assert cached(server, "one", cache_salt="mine") == 63


def test_a_warm_prefix_is_found_by_the_first_request(tmp_path: Path) -> None:
    prefixes = tmp_path / "prefixes.jsonl"
    whole = {"prompt": list(range(20, 84))}
    prefixes.write_text(f"{json.dumps(whole | {'for': 'one'})}\n{json.dumps({'prompt': list(range(20, 52))})}\n")
    with Served("--api-key", "one=key-of-one", "two=key-of-two", "--warm-prefix", str(prefixes)) as server:
        assert cached(server, "key-of-one") == 63
        assert cached(server, "key-of-two") == 32

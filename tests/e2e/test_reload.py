"""Keys, tenants and certificates that change under 64 streams, and what is counted over a killed engine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import ssl
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from e2e.served import Served
from e2e.streams import Streamed, client, over_kills, stream
from support.certificates import Certificates, make_certificates

pytestmark = pytest.mark.e2e

STREAMS = 64
TOKENS = 800  # of a stream, several times as many as come during the reloads
SHORT = 150  # tokens of a stream over killed engines
RELOADS = 6
COMPARED = 16  # streams that are held against the same ones without reloads; of every key and way to choose
OPERATOR = {"authorization": "Bearer operator-key"}
LIMITS = httpx.Limits(max_connections=None)


class Files:
    """The files of keys, tenants and a certificate, which are replaced as operators do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificates = [make_certificates(self._made(name)) for name in ("one", "other")]
        self.change(0)

    def _made(self, name: str) -> Path:
        (self._folder / name).mkdir()
        return self._folder / name

    def path(self, name: str) -> Path:
        return self._folder / name

    def write(self, name: str, text: str) -> None:
        new = self.path("new")
        new.write_text(text)
        new.replace(self.path(name))

    def certificate(self, number: int) -> Certificates:
        return self.certificates[number % 2]

    def change(self, number: int) -> None:
        """The keys `of-NUMBER` of file and tenant come, those of the number before go; the certificate is the other."""
        self.write("keys", f"steady-key-1\nkey-of-file-{number}\n")
        tenants = {"acme": "steady-key-of-acme", "guest": f"key-of-guest-{number}"}
        entries = [
            {"name": name, "key_sha256": hashlib.sha256(key.encode()).hexdigest(), "weight": 1 + number}
            for name, key in tenants.items()
        ]
        self.write("tenants", yaml.safe_dump({"tenants": entries, "usage_file": "usage.json"}))
        both = self.certificate(number).server.read_text() + self.certificate(number).server_key.read_text()
        self.write("server.pem", both)

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--api-key", f"@{self.path('keys')}", "--tenants", str(self.path("tenants"))),
            *("--ssl-certfile", str(self.path("server.pem"))),
        )


def trusting(files: Files) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files.certificate(0).authority))
    context.load_verify_locations(cafile=str(files.certificate(1).authority))
    return context


def body(number: int, tokens: int = TOKENS) -> dict[str, Any]:
    sampling = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}
    return {"prompt": f"Story {number}:", "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True} | sampling


def key_of(number: int) -> dict[str, str]:
    """The first keys of all, some of which are taken away while their streams run."""
    keys = ("steady-key-1", "key-of-file-0", "steady-key-of-acme", "key-of-guest-0")
    return {"x-api-key": keys[number % len(keys)]}


async def streams(http: httpx.AsyncClient, seen: list[Streamed]) -> list[Streamed]:
    """All streams at once; `seen` has a place for each, to watch how far it is."""

    async def one(number: int) -> Streamed:
        def on_chunk(told: Streamed) -> None:
            seen[number] = told

        return await stream(http, body(number), headers=key_of(number), on_chunk=on_chunk)

    return await asyncio.gather(*map(one, range(len(seen))))


async def status(http: httpx.AsyncClient, key: str) -> int:
    return (await http.get("/v1/models", headers={"x-api-key": key})).status_code


async def until_logged(server: Served, line: str, times: int) -> None:
    async with asyncio.timeout(300):
        while server.log().count(line) < times:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def check_keys(http: httpx.AsyncClient, number: int) -> None:
    for kind in ("file", "guest"):
        assert await status(http, f"key-of-{kind}-{number}") == 200
        assert await status(http, f"key-of-{kind}-{number - 1}") == 401


async def reload_often(server: Served, files: Files, http: httpx.AsyncClient, seen: list[Streamed]) -> None:
    """Reload by signal and by order in turns, while all streams run, with a wrong file in between."""
    async with asyncio.timeout(300):
        while min(len(told.token_ids) for told in seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    signals = 0
    for number in range(1, RELOADS + 1):
        files.change(number)
        if number % 2:
            server.process.send_signal(signal.SIGHUP)
            signals += 1
            await until_logged(server, "quire.audit: reload by SIGHUP: 200", signals)
        else:
            reply = await http.post("/admin/reload", headers=OPERATOR)
            assert reply.status_code == 200, reply.text
            told = reply.json()
            assert told["keys"] == {"added": 2, "removed": 2}
            assert told["tenants"] == {"added": 0, "removed": 0, "changed": 2}
            assert told["certificate_expires"] > time.strftime("%Y-%m-%dT")
        os.kill(server.engine().pid, signal.SIGHUP)  # as where a terminal or a script signals the whole group
        await check_keys(http, number)
        context = ssl.create_default_context(cafile=str(files.certificate(number).authority))
        async with httpx.AsyncClient(verify=context, base_url=server.url) as fresh:
            assert (await fresh.get("/health/live")).status_code == 200, "the certificate is the new one"
    files.write("keys", "not-yet-a-key\n")
    files.write("tenants", "tenants: [")
    refused = await http.post("/admin/reload", headers=OPERATOR)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "reload_refused")
    server.process.send_signal(signal.SIGHUP)
    await until_logged(server, "quire.audit: reload by SIGHUP: 400", 1)
    await check_keys(http, RELOADS)
    assert await status(http, "not-yet-a-key") == 401


def test_64_streams_run_on_while_keys_tenants_and_certificates_change(tmp_path: Path) -> None:
    files = Files(tmp_path)

    async def run(server: Served) -> None:
        timeout = httpx.Timeout(120, connect=30)
        connect = {"verify": trusting(files), "base_url": server.url, "timeout": timeout, "limits": LIMITS}
        async with httpx.AsyncClient(**connect) as http:
            alone = await streams(http, [Streamed() for _ in range(COMPARED)])
            seen = [Streamed() for _ in range(STREAMS)]
            running = asyncio.create_task(streams(http, seen))
            await reload_often(server, files, http, seen)
            assert any(len(told.token_ids) < TOKENS for told in seen), "the reloads came while streams ran"
            together = await running
            metrics = (await http.get("/metrics")).text
        for each in (*alone, *together):
            assert (each.status, each.errors, each.done, each.finish_reasons) == (200, [], True, ["length"])
            assert len(each.token_ids) == TOKENS
        for one, other in zip(alone, together[:COMPARED], strict=True):
            assert (other.text, other.token_ids) == (one.text, one.token_ids)
        assert 'quire_engine_restarts_total{model_name="quire-demo"} 0.0' in metrics
        assert server.process.poll() is None

    with Served(*files.flags, "--max-num-seqs", "64", env={"QUIRE_ADMIN_API_KEY": "operator-key"}) as server:
        asyncio.run(run(server))


def test_tokens_over_a_killed_engine_are_counted_once_and_survive_a_restart(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    digest = hashlib.sha256(b"key-of-acme").hexdigest()
    entry = {"name": "acme", "key_sha256": digest, "tokens_per_day": 4_000}
    tenants.write_text(yaml.safe_dump({"tenants": [entry], "usage_file": "usage.json"}))
    headers = {"x-api-key": "key-of-acme"}

    def used(server: Served) -> dict[str, int]:
        (row,) = httpx.get(server.url + "/usage", headers=headers).json()["usage"]
        return {name: row[name] for name in ("requests", "prompt_tokens", "output_tokens")}

    async def kill_under_streams(server: Served) -> None:
        bodies = [body(number, SHORT) for number in range(8)]
        async with client(server.url) as http:
            ended = await over_kills(server, http, bodies, [SHORT // 3, 2 * SHORT // 3], headers=headers)
        assert [(each.errors, len(each.token_ids)) for each in ended] == [([], SHORT)] * 8

    with Served("--tenants", str(tenants)) as server:
        asyncio.run(kill_under_streams(server))
        assert server.metric("quire_engine_restarts_total") == 2
        first = used(server)
        assert (first["requests"], first["output_tokens"]) == (8, 8 * SHORT)
        assert first["prompt_tokens"] == server.metric("quire_prompt_tokens_total")
    with Served("--tenants", str(tenants)) as server:
        assert used(server) == first
        long = {"prompt": list(range(20, 420)), "max_tokens": 1, "model": "quire-demo"}
        statuses = [
            httpx.post(server.url + "/v1/completions", json=long, headers=headers, timeout=60).status_code
            for _ in range(8)
        ]
        left = 4_000 - sum(first[name] for name in ("prompt_tokens", "output_tokens"))
        assert statuses == [200] * (left // 401) + [429] * (8 - left // 401)

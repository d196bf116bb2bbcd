"""What holds for a server holds for two API servers together: keys, certificates, adapters, rates, budgets, a path.

Every request has a connection of its own, and so comes to either of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import signal
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from e2e.served import Served
from e2e.streams import Streamed, stream
from e2e.test_api_servers import both_serve, until
from support.adapters import write_adapter
from support.certificates import Certificates, make_certificates
from support.checkpoints import make_checkpoint
from support.processes import children_running

pytestmark = pytest.mark.e2e

EACH = 12  # requests of a kind: all at one of two, one time in two thousand
RATE = 4  # requests a minute
BUDGET = 120  # tokens a day
ADMIN = {"authorization": "Bearer operator-key"}
PROCESS = "quire_server.api_servers"


class Files:
    """The files that a reload reads again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.certificates: list[Certificates] = []
        for name in ("one", "other"):
            (folder / name).mkdir()
            self.certificates.append(make_certificates(folder / name))
        self.change(0)

    def change(self, number: int) -> None:
        """The key `of-file-NUMBER` comes and the one before it goes, and the certificate is the other one."""
        tenants = [
            {"name": "slow", "requests_per_minute": RATE},
            {"name": "small", "tokens_per_day": BUDGET},
        ]
        for entry in tenants:
            entry["key_sha256"] = hashlib.sha256(f"key-of-{entry['name']}".encode()).hexdigest()
        made = self.certificates[number % 2]
        self._write("keys", f"steady-key-1\nkey-of-file-{number}\n")
        self._write("tenants", yaml.safe_dump({"tenants": tenants}))
        self._write("server.pem", made.server.read_text() + made.server_key.read_text())

    def _write(self, name: str, text: str) -> None:
        (self._folder / "new").write_text(text)
        (self._folder / "new").replace(self._folder / name)

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--api-key", f"@{self._folder / 'keys'}", "--admin-api-key", "operator-key"),
            *("--tenants", str(self._folder / "tenants"), "--ssl-certfile", str(self._folder / "server.pem")),
        )

    def trusting(self, *numbers: int) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.certificates[numbers[0]].authority))
        for number in numbers[1:]:
            context.load_verify_locations(cafile=str(self.certificates[number].authority))
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"a{number}", model, seed=number) for number in range(2)]


@pytest.fixture(scope="module")
def server(files: Files, model: Path, adapters: list[Path]) -> Iterator[Served]:
    flags = ("--model", str(model), "--served-model-name", "tiny", "--enable-lora", "--lora-modules")
    with Served(
        *flags, f"a0={adapters[0]}", *files.flags, "--api-server-count", "2", "--set", "check_invariants=true"
    ) as started:
        both_serve(started)
        yield started


def body(**fields: Any) -> dict[str, Any]:
    asked = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    return {**asked, "return_token_ids": True, **fields}


def ask(server: Served, files: Files, key: str = "steady-key-1", trust: tuple[int, ...] = (0, 1), **fields: Any) -> Any:
    with httpx.Client(base_url=server.url, timeout=120, verify=files.trusting(*trust)) as http:
        return http.post("/v1/completions", json=body(**fields), headers={"x-api-key": key})


def order(server: Served, files: Files, path: str, **fields: Any) -> httpx.Response:
    with httpx.Client(base_url=server.url, timeout=120, verify=files.trusting(0, 1)) as http:
        reply = http.post(path, json=fields or None, headers=ADMIN)
    assert reply.status_code == 200, reply.text
    return reply


def ids(reply: httpx.Response) -> tuple[int, ...]:
    assert reply.status_code == 200, reply.text
    return tuple(reply.json()["choices"][0]["token_ids"])


def test_adapters_are_those_of_the_last_order(server: Served, files: Files, adapters: list[Path]) -> None:
    plain = {ids(ask(server, files)) for _ in range(EACH)}
    first = [ask(server, files, model="a0") for _ in range(EACH)]
    assert len(plain) == len({ids(each) for each in first}) == 1
    assert plain != {ids(first[0])}
    assert all(each.headers["x-quire-adapter"].startswith("a0@sha256:") for each in first)
    for _ in range(2):
        assert {ask(server, files, model="a1").status_code for _ in range(EACH)} == {404}
        order(server, files, "/v1/load_lora_adapter", lora_name="a1", lora_path=str(adapters[1]))
        second = {ids(ask(server, files, model="a1")) for _ in range(EACH)}
        assert len(second) == 1
        assert second.isdisjoint(plain | {ids(first[0])})
        order(server, files, "/v1/unload_lora_adapter", lora_name="a1")


def test_keys_and_certificates_are_those_of_the_last_reload(server: Served, files: Files) -> None:
    async def running() -> list[Streamed]:
        async def one(number: int) -> Streamed:
            async with httpx.AsyncClient(base_url=server.url, timeout=120, verify=files.trusting(0, 1)) as http:
                told = body(max_tokens=400, seed=number, temperature=0.8)
                return await stream(http, told, headers={"x-api-key": "key-of-file-0"})

        return await asyncio.gather(*(one(number) for number in range(8)))

    async def reloading() -> list[Streamed]:
        """Reload while streams of the first key run."""
        generated = server.metric("quire_generation_tokens_total")
        streams = asyncio.create_task(running())
        await until(server, "quire_generation_tokens_total", generated + 80)
        await asyncio.to_thread(reload)
        return await streams

    def reload() -> None:
        for number in (1, 2, 3):
            files.change(number)
            told = order(server, files, "/admin/reload").json()
            assert told["keys"] == {"added": 1, "removed": 1}
            shown(number)
            for key, status in ((f"key-of-file-{number}", 200), (f"key-of-file-{number - 1}", 401)):
                got = [ask(server, files, key, (number % 2,), max_tokens=1).status_code for _ in range(EACH)]
                assert got == [status] * EACH

    def shown(number: int) -> None:
        """Until each of many handshakes shows the new certificate: the order waits for a second, not for ever."""
        deadline = time.monotonic() + 300
        while True:
            try:
                for _ in range(EACH):
                    ask(server, files, "steady-key-1", (number % 2,), max_tokens=1)
                return
            except httpx.ConnectError:
                assert time.monotonic() < deadline

    alone = asyncio.run(running())
    for before, after in zip(alone, asyncio.run(reloading()), strict=True):
        assert (after.status, after.errors, after.done) == (200, [], True)
        assert after.token_ids == before.token_ids


def test_a_tenants_rate_is_one_for_both(server: Served, files: Files) -> None:
    began = time.monotonic()
    replies = [ask(server, files, "key-of-slow", max_tokens=1) for _ in range(EACH)]
    statuses = Counter(each.status_code for each in replies)
    assert statuses.keys() == {200, 429}
    assert RATE <= statuses[200] <= RATE + math.ceil((time.monotonic() - began) * RATE / 60)
    refused = [each for each in replies if each.status_code == 429]
    assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
    assert server.metric("quire_tenant_rejected_total", tenant="slow") == len(refused)


def test_a_tenants_budget_is_one_for_both(server: Served, files: Files) -> None:
    used, replies = 0, []
    for number in range(BUDGET):
        reply = ask(server, files, "key-of-small", prompt=f"Number {number}")
        if reply.status_code != 200:
            break
        used += reply.json()["usage"]["total_tokens"]
        replies.append(reply)
    assert len(replies) > 2
    assert used >= BUDGET - 8
    refused = [ask(server, files, "key-of-small", prompt=f"Number {number}") for _ in range(EACH)]
    assert {(each.status_code, each.json()["error"]["code"]) for each in refused} == {(429, "tenant_day_budget")}
    for _ in range(4):
        with httpx.Client(base_url=server.url, timeout=60, verify=files.trusting(0, 1)) as http:
            told = http.get("/usage", headers={"x-api-key": "key-of-small"}).json()
        assert told["budgets"][0]["used"] == used
        assert sum(each["requests"] for each in told["usage"]) == len(replies)


def test_both_serve_one_path(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire_server.cli", "serve", "--uds", str(path), "--api-server-count", "2"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )

        def workers() -> list[psutil.Process]:
            return children_running(process.pid, PROCESS)

        def ready(number: int) -> None:
            """Wait until so many API servers have become ready."""
            deadline = time.monotonic() + 300
            while (tmp_path / "log").read_text().count("an API server is ready") < number:
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.05)

        def one(**fields: Any) -> tuple[int, ...]:
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(path)), base_url="http://quire", timeout=60
            ) as http:
                return ids(http.post("/v1/completions", json=body(**fields)))

        try:
            ready(2)
            alone = one()
            assert [one() for _ in range(EACH)] == [alone] * EACH
            workers()[0].send_signal(signal.SIGKILL)
            assert [one() for _ in range(EACH)] == [alone] * EACH, "the other one has the path too"
            ready(3)
            assert [one() for _ in range(EACH)] == [alone] * EACH
        finally:
            process.terminate()
            assert process.wait(40) == 0
    assert not path.exists()

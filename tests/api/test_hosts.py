"""The Host header: a server that only this machine reaches, without a key, answers to this machine's names."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from support.fakes import connect, exchange, listening, make_app, parse_reply

pytestmark = pytest.mark.anyio

OURS = (
    *("localhost", "localhost:8000", "LOCALHOST", "localhost.", "quire.localhost:1", "127.0.0.1", "127.0.0.1:8000"),
    *("127.9.8.7", "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]:80"),
)
FOREIGN = (
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost"),
    *("10.0.0.7", "192.168.1.5:8000", "0.0.0.0", "[::]", "[2001:db8::1]:80", "", ":8000", "localhost@evil.example"),
)


async def get(name: str, path: str = "/v1/models", /, **settings: object) -> httpx.Response:
    async with connect(make_app(allowed_hosts=settings.pop("allowed_hosts", ()), **settings)) as client:
        return await client.get(path, headers={"host": name})


@pytest.mark.parametrize("host", OURS)
async def test_this_machines_names_are_answered(host: str) -> None:
    assert (await get(host)).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
async def test_all_others_are_refused_with_the_way_out(host: str) -> None:
    reply = await get(host)
    assert reply.status_code == 403
    error = reply.json()["error"]
    assert error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in error["message"]
    assert reply.headers["x-request-id"]
    assert len(reply.content) < 600


async def test_the_refusal_comes_before_anything_is_done() -> None:
    async with connect(make_app(allowed_hosts=())) as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/docs"), ("GET", "/nothing")):
            reply = await client.request(method, path, headers={"host": "evil.example"}, content=b"{")
            assert reply.status_code == 403, path
        reply = await client.post("/v1/messages", headers={"host": "evil.example"})
        assert reply.json()["error"]["details"] == {"error_code": "host_not_allowed"}


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
async def test_probes_come_under_any_name(path: str) -> None:
    assert (await get("10.1.2.3:8000", path)).status_code == 200
    assert (await get("10.1.2.3:8000", f"/llm{path}", root_path="/llm")).status_code == 200
    assert (await get("evil.example", path + "/")).status_code == 403


async def test_names_can_be_added() -> None:
    names = ("llm.example.com", "*.cluster.local", "10.0.0.7")
    for host in ("llm.example.com", "LLM.example.com:443", "a.b.cluster.local", "localhost", "10.0.0.7:80"):
        assert (await get(host, allowed_hosts=names)).status_code == 200, host
    for host in ("example.com", "x.llm.example.com", "cluster.local", "evilcluster.local", "10.0.0.8"):
        assert (await get(host, allowed_hosts=names)).status_code == 403, host
    assert (await get("evil.example", allowed_hosts=("*",))).status_code == 200


@pytest.mark.parametrize(
    "settings", [{"host": "0.0.0.0"}, {"host": "192.0.2.7"}, {"host": "::"}, {"uds": Path("/run/quire.sock")}]
)
async def test_servers_that_others_reach_do_not_look(settings: dict[str, object]) -> None:
    assert (await get("anything.example", **settings)).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "::1", "127.0.0.1"])
async def test_every_way_to_listen_on_this_machine_counts(host: str) -> None:
    assert (await get("evil.example", host=host)).status_code == 403


async def test_a_key_is_protection_enough_and_a_list_is_kept_to_all_the_same() -> None:
    headers = {"authorization": "Bearer key", "host": "evil.example"}
    async with connect(make_app(api_key=("key",), allowed_hosts=())) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    async with connect(make_app(api_key=("key",), allowed_hosts=("llm.example",))) as client:
        assert (await client.get("/v1/models", headers=headers)).status_code == 403
        assert (await client.get("/v1/models", headers=headers | {"host": "llm.example"})).status_code == 200
    assert (await get("evil.example", host="0.0.0.0", allowed_hosts=("llm.example",))).status_code == 403


async def test_on_the_wire_one_foreign_name_is_enough() -> None:
    async with listening(make_app(allowed_hosts=())) as server:
        for head, status in (
            (b"Host: evil.example\r\n", 403),
            (b"Host: localhost\r\nHost: evil.example\r\n", 403),
            (b"Host: localhost\r\n", 200),
        ):
            raw = await exchange(server.port, b"GET /v1/models HTTP/1.1\r\n" + head + b"Connection: close\r\n\r\n")
            assert parse_reply(raw).status_code in {status, 400}, head
            assert b"HTTP/1.1 200" in raw or status != 200

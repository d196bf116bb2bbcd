"""`quire serve --api-server-count 2`: one is killed under streams; limits, orders and metrics are of both."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from e2e.served import Served
from e2e.streams import Streamed, stream
from support.processes import children_running

pytestmark = pytest.mark.e2e

FLAGS = ("--max-num-seqs", "8", "--max-num-queued-reqs", "56", "--set", "check_invariants=true")
NUM_STREAMS = 24
PROCESS = "quire_server.api_servers"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served(*FLAGS, "--api-server-count", "2", "--drain-timeout", "3600") as started:
        both_serve(started)
        yield started


def api_servers(server: Served) -> list[psutil.Process]:
    """The processes, the oldest first."""
    return children_running(server.process.pid, PROCESS)


def both_serve(server: Served) -> None:
    """Wait until each of two API servers answers requests itself, and no longer passes them on."""
    deadline = time.monotonic() + 300
    while True:
        pids = [each.pid for each in api_servers(server)]
        if len(pids) == 2 and all(f"is ready: process {pid}\n" in server.log() for pid in pids):
            return
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.05)


async def until(server: Served, name: str, value: float) -> None:
    """Wait until a metric has reached a value."""
    while await asyncio.to_thread(server.metric, name) < value:  # noqa: ASYNC110 - the server is another process
        await asyncio.sleep(0.01)


def body(number: int, max_tokens: int = 120) -> dict[str, Any]:
    return {
        "prompt": f"Once there were {number} owls",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": number,
        "return_token_ids": True,
    }


async def one(url: str, number: int, max_tokens: int = 120) -> Streamed | None:
    """A stream on a connection of its own; None: it was cut."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        try:
            return await stream(http, body(number, max_tokens))
        except httpx.TransportError:
            return None


async def all_of(url: str, count: int = NUM_STREAMS, max_tokens: int = 120) -> list[Streamed | None]:
    return await asyncio.gather(*(one(url, number, max_tokens) for number in range(count)))


def test_one_is_killed_and_the_streams_of_the_others_go_on(server: Served) -> None:
    alone = asyncio.run(all_of(server.url))
    assert all(each is not None and each.done for each in alone)
    ended, restarts = server.metric("quire_requests_total"), server.metric("quire_api_server_restarts_total")
    aborted = server.metric("quire_requests_total", outcome="abort")

    async def kill() -> list[Streamed | None]:
        running = asyncio.create_task(all_of(server.url))
        tokens = server.metric("quire_generation_tokens_total")
        await until(server, "quire_generation_tokens_total", tokens + NUM_STREAMS * 20)
        api_servers(server)[1].send_signal(signal.SIGKILL)
        return await running

    got = asyncio.run(kill())
    cut = [number for number, each in enumerate(got) if each is None]
    assert 0 < len(cut) < NUM_STREAMS
    for before, after in zip(alone, got, strict=True):
        if after is not None:
            assert before is not None
            assert after.done
            assert (after.token_ids, after.text, after.finish_reasons) == (
                before.token_ids,
                before.text,
                before.finish_reasons,
            )
    server.wait_idle()
    both_serve(server)
    assert server.metric("quire_api_server_restarts_total") == restarts + 1
    assert server.metric("quire_requests_total", outcome="abort") == aborted + len(cut)
    assert server.metric("quire_requests_total") == ended + NUM_STREAMS
    assert "API server" in server.log()
    again = asyncio.run(all_of(server.url))
    assert [each and each.token_ids for each in again] == [each and each.token_ids for each in alone]


def test_every_scrape_has_the_counts_of_all(server: Served) -> None:
    before = server.metric("quire_generation_tokens_total"), server.metric("quire_requests_total")
    asyncio.run(all_of(server.url, 16, 10))
    for _ in range(4):  # each on a connection of its own, and so at either of them
        assert server.metric("quire_generation_tokens_total") == before[0] + 160
        assert server.metric("quire_requests_total") == before[1] + 16
    assert server.metric("quire_http_requests_total", handler="/v1/completions") >= 16


def test_the_queue_is_one_for_all() -> None:
    with Served(
        "--max-num-seqs", "2", "--max-num-queued-reqs", "2", "--api-server-count", "2", "--itl-target", "0"
    ) as server:
        both_serve(server)
        got = asyncio.run(all_of(server.url, 16, 400))
        refused = [each for each in got if each is not None and each.status == 429]
        assert len(refused) == 12
        assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
        assert server.metric("quire_rejected_total", reason="max_num_queued_reqs") == 12
        server.wait_idle()


def test_an_order_holds_everywhere_before_its_reply(server: Served) -> None:
    for _ in range(6):
        assert httpx.post(server.url + "/admin/drain", timeout=120).json()["draining"]
        refused = [httpx.post(server.url + "/v1/completions", json=body(1, 1), timeout=120) for _ in range(4)]
        assert {each.status_code for each in refused} == {503}
        assert not httpx.delete(server.url + "/admin/drain", timeout=120).json()["draining"]
        served = [httpx.post(server.url + "/v1/completions", json=body(1, 1), timeout=120) for _ in range(4)]
        assert {each.status_code for each in served} == {200}


def test_an_operator_ends_a_request_wherever_it_is(server: Served) -> None:
    async def abort() -> list[Streamed | None]:
        running = asyncio.create_task(all_of(server.url, 8, 1500))
        await until(server, "quire_requests_running", 8)
        ended = await asyncio.to_thread(
            lambda: httpx.post(server.url + "/admin/abort", json={"all": True}, timeout=120)
        )
        assert ended.json()["num_aborted"] == 8
        assert all(name.startswith("req-") for name in ended.json()["request_ids"])
        return await running

    got = asyncio.run(abort())
    assert [each.errors[-1]["code"] for each in got if each is not None] == ["aborted"] * 8
    server.wait_idle()


def test_a_stopped_one_is_replaced() -> None:
    with Served(*FLAGS, "--api-server-count", "2", "--set", "engine_hang_timeout=8") as server:
        both_serve(server)
        os.kill(api_servers(server)[0].pid, signal.SIGSTOP)
        deadline = time.monotonic() + 300
        while "another one is started" not in server.log():
            assert time.monotonic() < deadline, server.log()
            time.sleep(0.1)
        both_serve(server)
        assert all(each is not None and each.done for each in asyncio.run(all_of(server.url, 8, 10)))


def test_a_stop_lets_all_streams_end(server: Served) -> None:
    """The last test, since it ends the server of the others."""

    async def stop() -> list[Streamed | None]:
        tokens = server.metric("quire_generation_tokens_total")
        running = asyncio.create_task(all_of(server.url, 16, 300))
        await until(server, "quire_generation_tokens_total", tokens + 16)
        server.process.send_signal(signal.SIGTERM)
        return await running

    got = asyncio.run(stop())
    assert all(each is not None and each.done and len(each.token_ids) == 300 for each in got)
    assert server.process.wait(300) == 0
    assert not [each for each in psutil.process_iter(["cmdline"]) if PROCESS in (each.info["cmdline"] or ())
                and str(server.process.pid) in each.info["cmdline"]]  # fmt: skip

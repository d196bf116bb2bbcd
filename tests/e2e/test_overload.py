"""Bursts, dropped streams and shutdown against a real server."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from e2e.served import Served
from e2e.streams import client, stream

pytestmark = pytest.mark.e2e


def request(i: int, tokens: int) -> dict[str, Any]:
    return {"prompt": f"{i}, {i + 1},", "max_tokens": tokens, "ignore_eos": True, "temperature": 0.8, "seed": i}


def test_five_hundred_dropped_streams_leave_nothing_behind() -> None:
    async def body(server: Served) -> None:
        rng = random.Random(5)
        gate = asyncio.Semaphore(50)

        async def drop(i: int) -> None:
            async with gate:
                # So long that a client that is held up for a second still leaves before the answer ends.
                seen = await stream(http, request(i, 1900), drop_after=rng.choice([0, 0, 1, 2, 5, 20, 60]))
                assert seen.status == 200

        async with client(server.url) as http:
            await asyncio.gather(*(drop(i) for i in range(500)))
        server.wait_idle()
        assert server.metric("quire_requests_total", outcome="abort") == 500
        assert server.metric("quire_engine_restarts_total") == 0

    with Served("--max-num-seqs", "32") as server:
        asyncio.run(body(server))


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served("--max-num-seqs", "8", "--max-num-queued-reqs", "32") as started:
        yield started


def test_a_burst_of_two_hundred_on_eight_seats_and_a_queue_of_32(server: Served) -> None:
    async def body() -> None:
        async with client(server.url) as http:
            # Answers so long that the seats and the queue are still taken when the last request comes.
            burst = await asyncio.wait_for(asyncio.gather(*(stream(http, request(i, 400)) for i in range(200))), 300)
            accepted = [i for i, seen in enumerate(burst) if seen.status == 200]
            refused = [seen for seen in burst if seen.status != 200]
            assert len(accepted) >= 40
            assert refused
            assert all(burst[i].done for i in accepted)
            for i in accepted[::10]:
                assert burst[i].text == (await stream(http, request(i, 400))).text
        for seen in refused:
            assert seen.status == 429
            assert int(seen.headers["retry-after"]) >= 1
            assert seen.errors[0]["code"] == "queue_full"
        assert server.metric("quire_rejected_total") == len(refused)
        server.wait_idle()

    asyncio.run(body())


def test_sigterm_finishes_or_answers_everything_and_leaves_nothing(server: Served) -> None:
    """The last of those with this server, which it ends."""

    async def body() -> None:
        async with client(server.url) as http:
            solo = {i: await stream(http, request(i, 200)) for i in range(0, 16, 3)}
            started = [False] * 16

            def mark(i: int) -> Any:
                return lambda _: started.__setitem__(i, True)

            tasks = [asyncio.create_task(stream(http, request(i, 200), on_chunk=mark(i))) for i in range(16)]
            async with asyncio.timeout(300):
                while sum(started) < 8:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            children = psutil.Process(server.process.pid).children(recursive=True)
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(300):
                while (await http.get("/health/ready")).status_code != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            late = await stream(http, request(99, 4))
            assert late.status == 503
            assert int(late.headers["retry-after"]) >= 1
            ended = await asyncio.wait_for(asyncio.gather(*tasks), 300)
        for i, seen in enumerate(ended):
            if seen.status == 200:
                assert seen.text == (solo[i].text if i in solo else seen.text)
                assert seen.done
            else:
                assert seen.status == 503
        assert sum(seen.status == 200 for seen in ended) >= 8
        assert await asyncio.to_thread(server.process.wait, 30) == 0
        assert not any(child.is_running() for child in children)

    asyncio.run(body())
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health")


def test_a_second_signal_aborts_at_once() -> None:
    async def body(server: Served) -> None:
        async with client(server.url) as http:
            task = asyncio.create_task(stream(http, request(1, 1900)))
            await asyncio.sleep(0.5)
            server.process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.2)
            server.process.send_signal(signal.SIGINT)
            seen = await asyncio.wait_for(task, 300)
        assert seen.done
        assert seen.errors
        assert await asyncio.to_thread(server.process.wait, 10) == 0

    with Served("--drain-timeout", "3600") as server:
        asyncio.run(body(server))

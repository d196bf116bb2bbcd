"""`quire serve --engines`: nodes are killed, stopped and replaced under mixed streams, and no client sees it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from e2e.served import Served, sample
from e2e.served_node import ServedNode
from replicas.__main__ import FLAGS, cpu_variant, replicas
from replicas.nodes import proxies
from replicas.streams import Said, differences, reached, streams
from support.link_secrets import make_secrets

pytestmark = pytest.mark.e2e

NUM_STREAMS = 48
OF_NODES = ("--max-model-len", "1024", "--kv-memory", "24MiB", "--packed-cache", "off")
PATIENT = "replica_silence=5"  # a busy host's pauses are not taken for a loss
OF_FRONTS = FLAGS[2:]


@pytest.fixture(scope="module")
def alone() -> tuple[list[Said], tuple[str, ...]]:
    """What the streams are with one engine, and the flags for the same bits."""
    with Served(*FLAGS) as server:
        return asyncio.run(streams(server.url, NUM_STREAMS)), cpu_variant(server)


@pytest.fixture(scope="module")
def nodes(alone: tuple[list[Said], tuple[str, ...]]) -> Iterator[list[ServedNode]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ServedNode(*OF_NODES, *alone[1], limits=PATIENT)) for _ in range(2)]


@pytest.fixture(scope="module")
def front(nodes: list[ServedNode]) -> Iterator[Served]:
    with Served("--engines", ",".join(node.address for node in nodes), *OF_FRONTS, limits=PATIENT) as started:
        yield started


@pytest.fixture
def server(front: Served, nodes: list[ServedNode]) -> Served:
    """The front, with all nodes there."""
    for node in nodes:
        if node.process.poll() is not None:
            node.start()
    ready(front, 2)
    return front


def ready(server: Served, count: int) -> None:
    """Wait until so many nodes serve."""
    deadline = time.monotonic() + 300
    while sum(row["state"] == "ready" for row in replicas(server)) != count:
        assert time.monotonic() < deadline, replicas(server)
        time.sleep(0.05)


def test_a_killed_node_is_not_seen_by_any_client(server: Served, nodes: list[ServedNode], alone: Any) -> None:
    async def kill(share: Callable[[], float]) -> None:
        await reached(share, 0.3)
        nodes[0].process.kill()
        nodes[0].process.wait()

    got = asyncio.run(streams(server.url, NUM_STREAMS, kill))
    assert not differences(alone[0], got)
    assert server.metric("quire_streams_moved_total") > 0
    assert server.metric("quire_replica_up") == 1
    (lost,) = (row for row in replicas(server) if row["state"] != "ready")
    assert (lost["name"], lost["state"], lost["pid"]) == (nodes[0].address, "lost", None)
    assert lost["why"]
    nodes[0].start()
    ready(server, 2)
    server.wait_idle()


def test_nodes_are_replaced_one_after_the_other_under_load(server: Served, nodes: list[ServedNode], alone: Any) -> None:
    async def roll(share: Callable[[], float]) -> None:
        await reached(share, 0.15)
        for node in nodes:
            assert await asyncio.to_thread(node.stop) == 0
            await asyncio.to_thread(node.start)
            await asyncio.to_thread(ready, server, 2)

    moved = server.metric("quire_streams_moved_total")
    got = asyncio.run(streams(server.url, NUM_STREAMS, roll))
    assert not differences(alone[0], got)
    assert server.metric("quire_streams_moved_total") > moved
    ready(server, 2)


def test_a_stopped_node_is_given_up_and_two_fronts_share_the_nodes(
    server: Served, nodes: list[ServedNode], alone: Any
) -> None:
    async def both(second: Served) -> tuple[list[Said], list[Said]]:
        async def stop(share: Callable[[], float]) -> None:
            await reached(share, 0.3)
            nodes[1].process.send_signal(signal.SIGSTOP)

        half = NUM_STREAMS // 2
        return await asyncio.gather(streams(server.url, half, stop), streams(second.url, half))

    addresses, silences = ",".join(node.address for node in nodes), server.log().count("no sign of life")
    with Served("--engines", addresses, *OF_FRONTS, limits=PATIENT) as second:
        try:
            for got in asyncio.run(both(second)):
                assert not differences(alone[0][: len(got)], got)
        finally:
            nodes[1].process.send_signal(signal.SIGCONT)
        assert server.log().count("no sign of life") > silences
        ready(server, 2)
        ready(second, 2)


def test_a_wire_that_is_cut_in_one_direction_is_noticed_from_the_other(nodes: list[ServedNode], alone: Any) -> None:
    with ExitStack() as stack:
        between = stack.enter_context(proxies(nodes))
        engines = ",".join(str(each.address) for each in between)
        front = stack.enter_context(Served("--engines", engines, *OF_FRONTS, limits="replica_silence=3"))
        ready(front, 2)

        async def cut(share: Callable[[], float]) -> None:
            await reached(share, 0.3)
            between[0].to_node = False

        got = asyncio.run(streams(front.url, 40, cut))
        assert not differences(alone[0][:40], got)
        deadline = time.monotonic() + 120  # the streams may end sooner than the silence is noticed
        while "no sign of life" not in front.log():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        between[0].heal()
        between[0].end_connections()
        ready(front, 2)


def test_health_questions_and_orders_go_to_nodes(server: Served, nodes: list[ServedNode]) -> None:
    rows = replicas(server)
    assert [row["name"] for row in rows] == [node.address for node in nodes]
    assert len({row["numerics"] for row in rows}) == 1
    restarts = server.metric("quire_engine_restarts_total")
    assert all(row["pid"] and row["pid"] != node.process.pid for row, node in zip(rows, nodes, strict=True))
    assert server.metric("quire_kv_pool_blocks") == server.metric("quire_kv_blocks")
    name = rows[1]["name"]
    with httpx.Client(base_url=server.url, timeout=120) as http:
        body = {"prompt": "Once upon a time", "max_tokens": 4}
        assert http.post("/v1/completions", json=body, headers={"x-request-id": "q"}).status_code == 200
        assert http.get("/debug/requests/q").json()["requests"][0]["replica"] in {row["name"] for row in rows}
        assert http.get("/debug/kv/audit", params={"replica": name}).json()["clean"] is True
        assert http.post("/admin/reset-prefix-cache").status_code == 200
        assert http.post(f"/admin/replicas/{name}/drain").json()["draining"] is True
        assert http.delete(f"/admin/replicas/{name}/drain").json()["draining"] is False
        os.kill(rows[0]["pid"], signal.SIGKILL)
        assert http.get("/health/ready").status_code == 200
        assert http.post("/v1/completions", json=body).status_code == 200
        ready(server, 2)
        assert server.metric("quire_engine_restarts_total") == restarts + 1


def health(*argv: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "quire_server.cli", "health", "--timeout", "20", *argv],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_links_with_the_documents_secrets_carry_streams_and_others_are_refused(tmp_path: Path, alone: Any) -> None:
    secrets = []
    for name in ("own", "other"):
        folder = tmp_path / name
        folder.mkdir()
        make_secrets(folder)
        files = {"engine-tls-cert": "peer.crt", "engine-tls-key": "peer.key", "engine-tls-ca": "ca.crt"}
        secrets.append([word for flag, file in files.items() for word in (f"--{flag}", str(folder / file))])
    own, other = secrets
    with ExitStack() as stack:
        node = stack.enter_context(ServedNode(*OF_NODES, *alone[1], *own, limits=PATIENT))
        front = stack.enter_context(Served("--engines", node.address, *own, *OF_FRONTS))
        got = asyncio.run(streams(front.url, 16))
        assert not differences(alone[0][:16], got)
        assert health("--node", node.address, *own) == (0, f"quire health: {node.address}: ready\n")
        for strangers in (other, other[:4] + own[4:], []):
            code, line = health("--node", node.address, "--timeout", "3", *strangers)
            assert code == 1, line
            assert line.count("\n") == 1, line
        assert "was refused" in node.log()
        assert leaked_by_strangers(node) <= 2
        assert httpx.get(front.url + "/health/ready", timeout=120).status_code == 200
        node.process.send_signal(signal.SIGHUP)
        assert node.process.wait(30) == 0, "as SIGTERM: it drains"
        assert httpx.get(front.url + "/health/ready", timeout=120).status_code == 503


def test_a_node_tells_prometheus_its_own_load_and_goes_on_over_a_restart() -> None:
    """By the names of a server, which counts the same tokens; what runs shows while it runs."""
    with (
        ServedNode(*OF_NODES, "--metrics-listen", "127.0.0.1:0", limits=PATIENT) as node,
        Served("--engines", node.address, *OF_FRONTS) as front,
    ):
        (url,) = re.findall(r"the node's metrics are at (http://127\.0\.0\.1:\d+/metrics)$", node.log(), re.MULTILINE)
        ready(front, 1)
        assert sample(url, "quire_load_progress_ratio") == 1.0
        assert sample(url, "vllm:num_requests_running") == sample(url, "vllm:kv_cache_usage_perc") == 0.0
        body = {"model": "quire-demo", "prompt": [1, 2, 3], "ignore_eos": True, "max_tokens": 900}
        seen = threading.Event()

        def ask_on() -> None:
            while not seen.is_set():
                httpx.post(front.url + "/v1/completions", json=body, timeout=60).raise_for_status()

        asking = threading.Thread(target=ask_on)
        asking.start()
        try:
            until(lambda: sample(url, "vllm:num_requests_running") == 1.0)
            until(lambda: sample(url, "vllm:kv_cache_usage_perc") > 0.0)
        finally:
            seen.set()
            asking.join()
        until(lambda: sample(url, "vllm:num_requests_running") == 0.0)
        decoded = sample(url, "quire_engine_computed_tokens_total", kind="decode")
        assert decoded == front.metric("quire_engine_computed_tokens_total", kind="decode") >= 899
        (row,) = replicas(front)
        psutil.Process(row["pid"]).kill()
        until(lambda: sample(url, "quire_engine_restarts_total") == 1.0)
        assert sample(url, "quire_engine_computed_tokens_total", kind="decode") == decoded
        root = url.removesuffix("/metrics")
        assert {httpx.get(root + path, timeout=120).status_code for path in ("/", "/health", "/v1/models")} == {404}
        taken = url.removeprefix("http://").removesuffix("/metrics")
        argv = ("engine", "--listen", "127.0.0.1:0", "--metrics-listen", taken)
        test_what_cannot_be_is_one_line(argv, f"quire engine: --metrics-listen {taken}: Address already in use")


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def leaked_by_strangers(node: ServedNode) -> int:
    """Handles that the node has more after 300 peers that speak no TLS, or stop in the middle of it."""
    host, _, port = node.address.rpartition(":")
    process = psutil.Process(node.process.pid)
    before = process.num_fds()
    for number in range(300):
        with socket.create_connection((host, int(port)), timeout=120) as peer:
            peer.sendall((b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", os.urandom(200))[number % 3])
            if number % 3:
                with suppress(ConnectionResetError):
                    peer.recv(1024)
    deadline = time.monotonic() + 300
    while process.num_fds() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    return process.num_fds() - before


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("engine", "--listen", "0.0.0.0:9000"), "quire engine: --listen 0.0.0.0:9000 is beyond this machine"),
        (("engine",), "quire engine: --listen is missing"),
        (("engine", "--listen", "127.0.0.1:0", "--port", "8000"), "quire engine: --port is a front's"),
        (("engine", "--listen", "9000"), "quire engine: --listen 9000: expected HOST:PORT"),
        (
            ("engine", "--listen", "127.0.0.1:0", "--metrics-listen", "9"),
            "quire engine: --metrics-listen 9: expected HOST",
        ),
        (("serve", "--engines", "10.0.0.7:9000"), "quire serve: --engines 10.0.0.7:9000 is beyond this machine"),
        (("serve", "--engines", "127.0.0.1:9", "--kv-memory", "1GiB"), "quire serve: --kv-memory is the nodes'"),
        (("serve", "--listen", "127.0.0.1:9"), "quire serve: --listen is of `quire engine`"),
        (("serve", "--engines", "127.0.0.1:9", "--replicas", "2"), "exclude each other"),
    ],
)
def test_what_cannot_be_is_one_line(argv: tuple[str, ...], line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "quire_server.cli", *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1

"""`deploy/ray_serve.py` on a real cluster of one machine: streams survive the loss of a node, of an actor, and updates.

Run by `make ray-test` in an environment that has Ray. Every command of docs/nodes.md, Ray, that can be run here is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STREAMS, TOKENS = 8, 400
SECONDS = 180.0  # for whatever a cluster on a busy machine takes


def free_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Cluster:
    """Ray's processes with Serve, on 127.0.0.1 and free ports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.front, self.proxy, self.head, self.dashboard = (free_port() for _ in range(4))
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "deploy"),
            "RAY_ADDRESS": f"127.0.0.1:{self.head}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
        self.url, self.proxied = f"http://127.0.0.1:{self.front}", f"http://127.0.0.1:{self.proxy}"

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            [str(BIN / argv[0]), *argv[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self) -> None:
        ports = ("--port", self.head, "--ray-client-server-port", free_port(), "--dashboard-port", self.dashboard)
        agents = ("--dashboard-agent-listen-port", free_port(), "--object-store-memory", 100_000_000)
        where = ("--node-ip-address", "127.0.0.1", "--dashboard-host", "127.0.0.1", "--temp-dir", self.folder)
        self.run(
            "ray", "start", "--head", "--num-cpus", "4", "--disable-usage-stats", *map(str, (*ports, *agents, *where))
        )

    def deploy(self, **args: Any) -> None:
        """What configs/ray/two-replicas.yaml says, with these arguments changed; waits until it runs."""
        file = yaml.safe_load((ROOT / "configs" / "ray" / "two-replicas.yaml").read_text())
        file["http_options"] = {"host": "127.0.0.1", "port": self.proxy}
        given = file["applications"][0]["args"]
        given["fronts"]["port"] = self.front
        for name, value in args.items():
            given[name] = {**given[name], **value} if isinstance(value, dict) else value
        path = self.folder / "app.yaml"
        path.write_text(yaml.safe_dump(file))
        self.run("serve", "deploy", "--address", f"http://127.0.0.1:{self.dashboard}", str(path))
        self.until(lambda: self.status()["status"] in ("RUNNING", "DEPLOY_FAILED"), "the application to run")

    def status(self) -> dict[str, Any]:
        told = yaml.safe_load(self.run("serve", "status", "--address", f"http://127.0.0.1:{self.dashboard}"))
        status: dict[str, Any] = told["applications"]["quire"]
        return status

    def rows(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = httpx.get(f"{self.url}/admin/replicas").json()["replicas"]
        return replicas

    def until(self, holds: Any, what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                if holds():
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"waited {SECONDS:g} s for {what}: {self.status()}"
            time.sleep(0.2)

    def ready(self) -> int:
        return sum(row["state"] == "ready" for row in self.rows())

    def actor_of(self, pid: int) -> psutil.Process:
        """Ray's worker above an engine process."""
        return next(
            each for each in psutil.Process(pid).parents() if "ServeReplica" in each.name() + "".join(each.cmdline())
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Ray's sockets have names of at most 107 bytes.
    made = Cluster(Path(f"/tmp/quire-ray-{os.getpid()}"))
    made.folder.mkdir()
    made.start()
    try:
        made.deploy(drain_seconds=20)
        made.until(lambda: made.ready() == 2, "two nodes")
        yield made
    finally:
        subprocess.run([str(BIN / "ray"), "stop", "--force"], env=made.environment, capture_output=True, check=False)


def stream(url: str, number: int, begun: threading.Event | None = None) -> tuple[str, str | None]:
    """A streamed answer and its finish reason: greedy for even numbers, else drawn with a seed."""
    body = {
        "model": "quire-demo",
        "prompt": f"{number} birds sat on a wall and",
        "max_tokens": TOKENS,
        "min_tokens": TOKENS,
        "stream": True,
        "seed": number,
        "temperature": float(number % 2),
    }
    text, reason, chunks = "", None, 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            data = json.loads(line[6:])
            assert "error" not in data, data
            text += data["choices"][0]["text"]
            reason = data["choices"][0]["finish_reason"] or reason
            chunks += 1
            if begun is not None and chunks == 20:
                begun.set()
    return text, reason


def streams_during(url: str, act: Any) -> list[tuple[str, str | None]]:
    """All streams, with `act` called when each has tokens."""
    begun = [threading.Event() for _ in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        asked = [pool.submit(stream, url, number, begun[number]) for number in range(STREAMS)]
        for event in begun:
            assert event.wait(SECONDS)
        act()
        return [each.result() for each in asked]


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[tuple[str, str | None]]:
    found = streams_during(cluster.url, lambda: None)
    assert all(reason == "length" and text for text, reason in found)
    return found


@pytest.mark.timeout(600)
def test_streams_survive_the_actor_of_a_node_and_another_one_comes(cluster: Cluster, expected: list[Any]) -> None:
    before = {row["name"] for row in cluster.rows()}

    def kill() -> None:
        busiest = max(cluster.rows(), key=lambda row: row["streams"])
        assert busiest["streams"]
        cluster.actor_of(busiest["pid"]).kill()

    assert streams_during(cluster.url, kill) == expected
    cluster.until(lambda: cluster.ready() == 2 and {row["name"] for row in cluster.rows()} != before, "another node")


@pytest.mark.timeout(600)
def test_streams_survive_the_whole_tree_of_a_node(cluster: Cluster, expected: list[Any]) -> None:
    def kill() -> None:
        worker = cluster.actor_of(max(cluster.rows(), key=lambda row: row["streams"])["pid"])
        for each in (*worker.children(recursive=True), worker):
            each.kill()

    assert streams_during(cluster.url, kill) == expected
    cluster.until(lambda: cluster.ready() == 2, "another node")


@pytest.mark.timeout(900)
def test_an_update_replaces_the_nodes_in_turns_and_loses_nothing(cluster: Cluster, expected: list[Any]) -> None:
    before = {row["name"] for row in cluster.rows()}
    flags = ["--kv-memory", "256MiB", "--num-threads", "1", "--max-num-seqs", "48"]
    found: list[Any] = []
    deployed = threading.Event()

    def ask_on() -> None:
        while not deployed.is_set():
            found.extend(streams_during(cluster.url, lambda: None))

    asking = threading.Thread(target=ask_on)
    asking.start()
    try:
        cluster.deploy(drain_seconds=20, nodes={"flags": flags})
        cluster.until(
            lambda: cluster.ready() == 2 and not before & {row["name"] for row in cluster.rows()}, "new nodes"
        )
    finally:
        deployed.set()
        asking.join()
    assert found
    assert all(each == expected[at % STREAMS] for at, each in enumerate(found))


@pytest.mark.timeout(900)
def test_the_proxy_passes_streams_on_where_it_is_asked_to(cluster: Cluster, expected: list[Any]) -> None:
    assert httpx.get(f"{cluster.proxied}/", timeout=SECONDS).json() == {"fronts": [cluster.url]}
    cluster.deploy(drain_seconds=20, proxied=True)
    cluster.until(lambda: cluster.ready() == 2, "the new front")
    assert stream(cluster.proxied, 1) == expected[1]
    bad = httpx.post(f"{cluster.proxied}/v1/completions", json={"model": "quire-demo", "prompt": 1}, timeout=SECONDS)
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")


def test_wrong_arguments_are_refused_by_name(cluster: Cluster) -> None:
    import ray_serve

    for given, why in (
        ({"modle": "x"}, "modle"),
        ({"nodes": {"number": 3, "most": 2}}, "nodes.most=2 is less than nodes.number=3"),
        ({"fronts": {"port": 70_000}}, "port"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            ray_serve.build(given)


def test_a_program_that_ends_by_itself_is_told_with_its_code_and_last_lines() -> None:
    import ray_serve

    child = ray_serve.Child(["sh", "-c", "echo it begins; sleep 0.5; echo no memory; exit 3"], 1.0)
    assert child.wait_for("it begins", 20.0)
    with pytest.raises(RuntimeError, match=r"^it has ended with 3:\nit begins\nno memory\n$"):
        child.wait_for("never said", 20.0)


def test_a_program_gets_sigterm_when_its_parent_lets_go() -> None:
    import ray_serve

    child = ray_serve.Child(["sh", "-c", "trap 'echo drained; exit 0' TERM; echo up; while :; do sleep 0.1; done"], 5.0)
    assert child.wait_for("^up", 20.0)
    child.end()
    assert child.wait_for("drained", 20.0)


def test_nodes_that_are_not_renewed_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray_serve
    from quire_engine.routing.fleet import Wanted

    now = 100.0
    monkeypatch.setattr(ray_serve.time, "monotonic", lambda: now)
    registry = ray_serve.Registry()
    assert registry.renew_node("a", "10.0.0.1:1") == -1
    assert registry.renew_front("f", "http://10.0.0.9:8000", Wanted(2.4, 0)) == ["10.0.0.1:1"]
    now += 1.5
    registry.renew_front("h", "", None)  # it starts
    assert registry.renew_node("b", "10.0.0.2:1") == 3
    registry.renew_front("h", "http://10.0.0.7:8000", Wanted(1.2, 0))
    assert registry.renew_node("b", "10.0.0.2:1") == 4
    registry.renew_front("h", "http://10.0.0.7:8000", Wanted(1.2, 6))
    assert registry.renew_node("b", "10.0.0.2:1") == 6
    now += 1.0
    assert registry.renew_front("g", "http://10.0.0.8:8000", Wanted(1.0, 0)) == ["10.0.0.2:1"]
    now += 1.5
    registry.renew_front("g", "http://10.0.0.8:8000", Wanted(1.0, 0))
    registry.renew_node("b", "10.0.0.2:1")
    assert registry.fronts() == ["http://10.0.0.8:8000"]
    registry.drop_node("b")
    assert registry.renew_front("g", "http://10.0.0.8:8000", Wanted(1.0, 0)) == []


@pytest.mark.timeout(900)
def test_nodes_are_added_as_the_fronts_want(cluster: Cluster, expected: list[Any]) -> None:
    cluster.deploy(drain_seconds=20, nodes={"number": 1, "most": 2}, registry="another")  # fronts that want nothing yet
    cluster.until(lambda: cluster.ready() == 1, "one node to be left")
    stop = threading.Event()

    def ask_on(number: int) -> None:
        while not stop.is_set():
            assert stream(cluster.url, number) == expected[number]

    with ThreadPoolExecutor(STREAMS) as pool:
        asked = [pool.submit(ask_on, number) for number in range(STREAMS)]
        try:
            cluster.until(lambda: cluster.ready() == 2, "a second node under load")
        finally:
            stop.set()
        for each in asked:
            each.result()


@pytest.mark.timeout(900)
def test_an_update_to_another_model_leaves_no_front_with_the_nodes_of_the_old_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = tmp_path / "other-model"
    shutil.copytree(ROOT / "engine" / "quire_engine" / "demo" / "quire-demo", other)
    with (other / "tokenizer.json").open("a") as tokenizer:
        tokenizer.write("\n")
    cluster.deploy(drain_seconds=20, model=str(other))
    cluster.until(lambda: cluster.ready() == 2, "nodes of the other model")
    body = {"model": "other-model", "prompt": "Once", "max_tokens": 4}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=SECONDS).status_code == 200


def test_the_commands_of_the_page_are_those_that_run_here(cluster: Cluster) -> None:
    page = (ROOT / "docs" / "nodes.md").read_text().split("\n## Ray\n")[1]
    commands = re.search(r"```sh\n(.*?)```", page, re.DOTALL)
    assert commands is not None
    words = [line.split()[:2] for line in commands[1].splitlines()]
    assert words == [
        ["pip", "install"],
        ["PYTHONPATH=deploy", "RAY_worker_niceness=0"],
        ["serve", "deploy"],
        ["curl", "http://127.0.0.1:8000/v1/completions"],
        ["serve", "status"],
    ]
    shown = cluster.status()
    assert shown["status"] == "RUNNING"
    assert {name: each["status"] for name, each in shown["deployments"].items()} == {
        "QuireNode": "HEALTHY",
        "QuireFront": "HEALTHY",
    }

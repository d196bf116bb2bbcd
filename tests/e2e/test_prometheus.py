"""A real Prometheus scrapes a real server and answers queries about first tokens and the KV cache."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from e2e.served import Served
from support.exposition import check_with_promtool

CONFIGS = Path(__file__).parents[2] / "configs"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="needs Debian's prometheus (make test-e2e installs it where it may)",
    ),
]


@contextmanager
def prometheus(target: str, folder: Path, rules: Callable[[str], str] = str) -> Iterator[str]:
    """Our own scrape configuration and alert rules, changed by `rules`. Yields the query address."""
    config = yaml.safe_load((CONFIGS / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yml").write_text(rules((CONFIGS / "prometheus" / "alerts.yml").read_text()))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def query(address: str, expression: str) -> list[float]:
    """The values of an instant query; none while Prometheus is not up yet."""
    try:
        reply = httpx.get(f"{address}/api/v1/query", params={"query": expression}, timeout=120)
    except httpx.TransportError:
        return []
    if reply.status_code == 503:
        return []
    reply.raise_for_status()
    return [float(sample["value"][1]) for sample in reply.json()["data"]["result"]]


def wait_for(address: str, expression: str, seconds: float = 30.0) -> float:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        values = query(address, expression)
        if values:
            return values[0]
        time.sleep(0.3)
    raise AssertionError(f"no answer to {expression} within {seconds} s")


def complete(server: Served, max_tokens: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served("--kv-memory", "8MiB") as started:
        yield started


@pytest.fixture(scope="module")
def address(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with prometheus(server.url.removeprefix("http://"), tmp_path_factory.mktemp("prometheus")) as started:
        wait_for(started, 'up{job="quire"} == 1')
        yield started


def test_prometheus_answers_queries_about_this_server(server: Served, address: str) -> None:
    before = wait_for(address, "quire_time_to_first_token_seconds_count")
    for _ in range(3):
        complete(server, max_tokens=32)
    assert wait_for(address, f"quire_time_to_first_token_seconds_count >= {before + 3}") == before + 3
    ttft = "quire_time_to_first_token_seconds"
    assert 0 < wait_for(address, f"{ttft}_sum / {ttft}_count") < 30
    quantile = f"histogram_quantile(0.95, sum by (le) (rate({ttft}_bucket[1m]))) >= 0"
    assert 0 < wait_for(address, quantile) <= 40
    wait_for(address, "quire_generation_tokens_total == 96")
    assert wait_for(address, "quire_kv_cache_usage_ratio") == wait_for(address, "vllm:kv_cache_usage_perc")
    assert wait_for(address, "sum(quire_kv_blocks) - sum(quire_kv_pool_blocks)") == 0
    assert wait_for(address, 'quire_kv_blocks{state="cached"}') > 0
    assert query(address, 'ALERTS{alertstate="firing"}') == []
    rules = httpx.get(f"{address}/api/v1/rules").json()["data"]["groups"]
    assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
    assert httpx.get(f"{address}/api/v1/targets").json()["data"]["activeTargets"][0]["lastError"] == ""


def test_a_busy_cache_is_seen(server: Served, address: str) -> None:
    """While long answers run, usage is above zero; after the last, broken off, it is zero again."""
    seen = threading.Event()

    def answer_until_seen() -> None:
        body = {"prompt": "Once", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        while not seen.is_set():
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
                for _ in reply.iter_lines():
                    if seen.is_set():
                        break

    client = threading.Thread(target=answer_until_seen)
    client.start()
    try:
        assert wait_for(address, "quire_kv_cache_usage_ratio > 0") > 0
        assert wait_for(address, "vllm:num_requests_running > 0") == 1
    finally:
        seen.set()
        client.join()
    assert wait_for(address, "quire_kv_cache_usage_ratio == 0") == 0
    assert wait_for(address, "vllm:num_requests_running == 0") == 0


def test_promtool_accepts_the_metrics_of_a_running_server_but_for_names_that_others_chose(server: Served) -> None:
    complete(server, max_tokens=4)
    check_with_promtool(httpx.get(f"{server.url}/metrics").content)

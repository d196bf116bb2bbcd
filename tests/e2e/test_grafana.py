"""Every query of the Grafana dashboard gets an answer from a real Prometheus, and alerts fire in a real overload."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from e2e.served import Served
from e2e.test_prometheus import CONFIGS, complete, prometheus, query, wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="needs Debian's prometheus (make test-e2e installs it where it may)",
    ),
]

# What is empty while all is well, and why.
EMPTY = {
    "Engine restarts": "an annotation for each restart; there was none",
    "A row for each replica": "there is one engine",
    "Routes by reason": "there is one engine",
    "First output: predicted and seen": "there is one engine",
    "Ranks waiting for others": "one process computes the model",
    "Engine busy": "the share of a GPU: there is none",
}
OVERLOAD = {"QuireKVCacheNearlyFull", "QuireKVCacheFull", "QuireWaitingForKV", "QuireRejecting"}


def queries() -> list[tuple[str, str]]:
    dashboard = json.loads((CONFIGS / "grafana" / "quire.json").read_text())
    found = [(p["title"], target["expr"]) for p in dashboard["panels"] for target in p.get("targets", ())]
    found += [(note["name"], note["expr"]) for note in dashboard["annotations"]["list"]]
    # As Grafana fills in its variables.
    return [(title, text.replace("$model", ".*").replace("$__rate_interval", "15s")) for title, text in found]


def shortened(text: str) -> str:
    """Rules that need seconds where ours need minutes; what they look for stays."""
    rules = yaml.safe_load(text)
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = re.sub(r"\[\d+[ms]\]", "[6s]", rule["expr"])
        if "for" in rule:
            rule["for"] = "2s"
    return yaml.safe_dump(rules)


@contextmanager
def overload(server: Served, clients: int) -> Iterator[None]:
    """More clients than the pool has memory for and the queue has places, each with one request after the other.

    A request hardly grows after its prompt, and the pool holds almost exactly fifteen: what the scheduler keeps free
    for growth, and what an ended request leaves until the next has entered, stay below a tenth.
    """
    over = threading.Event()

    def client(number: int) -> None:
        prompt = f"{number} " + "Once upon a time " * 155
        body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "stream": True}
        while not over.is_set():
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
                for _ in reply.iter_lines():
                    if over.is_set():
                        break
            time.sleep(0.2)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_every_panel_has_data_and_the_alerts_fire_in_an_overload(tmp_path: Path) -> None:
    # More seats than the pool has memory for, so that it is the pool that is full.
    # Whole prompts in a step: how many requests run does not depend on how fast this machine computes prompts.
    options = ("--kv-memory", "32MiB", "--max-num-seqs", "24", "--max-num-queued-reqs", "4", "--itl-target", "0")
    with (
        Served(*options) as server,
        prometheus(server.url.removeprefix("http://"), tmp_path, shortened) as address,
    ):
        wait_for(address, 'up{job="quire"} == 1')
        for _ in range(3):
            complete(server, max_tokens=8)
        assert query(address, 'ALERTS{alertstate="firing"}') == []
        with overload(server, 36):
            for name in OVERLOAD:
                wait_for(address, f'ALERTS{{alertname="{name}", alertstate="firing"}}', seconds=60)
            # While it lasts, not only after.
            wait_for(address, "quire_kv_waiting_seconds > 0")
        server.wait_idle()
        complete(server, max_tokens=8)
        complete(server, max_tokens=8)
        wait_for(address, "rate(quire_request_prefill_time_seconds_count[15s]) > 0")
        answers = {(title, text): query(address, text) for title, text in queries()}
        empty = {title for (title, _), values in answers.items() if not values}
        assert empty == set(EMPTY)
        assert any(values for (title, _), values in answers.items() if title == "Engine busy"), "nor the engine's share"
        nan = {title for (title, _), values in answers.items() if values and all(map(math.isnan, values))}
        assert nan == set()
        assert len(answers) > 45
        rules = httpx.get(f"{address}/api/v1/rules").json()["data"]["groups"]
        loaded = {rule["name"]: rule["health"] for group in rules for rule in group["rules"]}
        assert set(loaded.values()) == {"ok"}
        assert set(loaded) > OVERLOAD

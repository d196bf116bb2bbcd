"""Facts on time and overload: F5, F17, F18.

Promises: the server's own times, of load that is made here.
"""

from __future__ import annotations

import threading
import time
from statistics import median
from typing import Any

from quire_bench.facts.fact import Fact, at_most
from quire_bench.facts.live import Live
from quire_bench.servers import BenchError

_REPEATS = 20
_STEADY_SECONDS = 75.0  # a minute's window, and what leads up to it
_OVERLOAD_SECONDS = 90.0
_STREAMS, _PROMPT = 96, 64
_ALERTS = {"QuireKVCacheNearlyFull", "QuireKVCacheFull"}


def first_token_parts(live: Live) -> list[Fact]:
    """F5: the time to the first token is the queue's and the prompt's, of requests that come alone."""
    names = ("time_to_first_token", "request_queue_time", "request_prefill_time")
    rests = []
    for _ in range(_REPEATS):
        whole, queue, prefill = (live.gain(f"quire_{name}_seconds_sum") for name in names)
        live.complete(live.prompt(64), 2)
        rests.append(abs(whole() - queue() - prefill()))
    return [at_most("F5 first token beyond queue and prompt, median", 1.0, median(rests) * 1e3, " ms")]


def littles_law(live: Live) -> list[Fact]:
    """F18: L = lambda W within 5 % after a minute of steady load."""
    over = threading.Event()

    def stream(number: int) -> None:
        time.sleep(number * 0.05)
        while not over.is_set():
            live.complete(live.prompt(16), 64)

    streams = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for each in streams:
        each.start()
    time.sleep(_STEADY_SECONDS)
    residual = live.metric("quire_littles_law_residual_ratio")
    over.set()
    for each in streams:
        each.join()
    return [at_most("F18 residual of Little's law", 5.0, abs(residual) * 100, " %")]


def full_cache_alerts(live: Live) -> list[Fact]:
    """F17: a pool that is kept full raises the alert for it."""
    # Together several times what the pool holds, each of them a small part: an end must not empty it noticeably.
    slots = int(live.label("quire_cache_config_info", "kv_tokens"))
    answer = max(1, min(live.max_model_len - _PROMPT, max(128, 6 * slots // _STREAMS)))
    over = threading.Event()

    def stream() -> None:
        while not over.is_set():
            try:
                live.complete(live.prompt(_PROMPT), answer)
            except BenchError:  # the queue is full, as it should be
                time.sleep(0.5)

    with live.watched() as seconds:
        streams = [threading.Thread(target=stream, daemon=True) for _ in range(_STREAMS)]
        for each in streams:
            each.start()
        deadline = time.monotonic() + _OVERLOAD_SECONDS
        while time.monotonic() < deadline and not (_firing(seconds) & _ALERTS):
            time.sleep(0.5)
        over.set()
        for each in streams:
            each.join()
    most = max(second["frame"]["blocks"]["used"] / second["frame"]["blocks"]["total"] for second in seconds)
    got = ", ".join(sorted(_firing(seconds))) or "none"
    return [
        Fact(
            name="F17 alerts of a KV cache that is kept full",
            expected="QuireKVCacheFull",
            got=f"{got}; at most {most:.0%} was used",
            ok="QuireKVCacheFull" in _firing(seconds),
        )
    ]


def _firing(seconds: list[dict[str, Any]]) -> set[str]:
    return {alert["name"] for second in seconds for alert in second["alerts"] if alert["firing"]}

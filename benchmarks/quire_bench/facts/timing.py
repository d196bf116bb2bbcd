"""Facts on time and overload: F5, F17, F18.

Promises: the server's own times, of load that is made here.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from quire_bench.facts.fact import Fact, at_most, not_shown
from quire_bench.facts.live import Live
from quire_bench.servers import BenchError

_REPEATS = 20
_STEADY_SECONDS = 75.0  # a minute's window, and what leads up to it
_FILL_SECONDS, _OVERLOAD_SECONDS = 300.0, 180.0  # until the pool is full; from then on, until the alert
_FULL, _ALERT_ABOVE = "QuireKVCacheFull", 0.9
_LEAST_REACH = 0.97  # share of the pool that the longest requests must be able to fill
_SPARE_STEPS = 1.25  # of an answer, over the steps that the others' prompts take


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """A load that keeps a pool full: so many streams of requests of these lengths, in tokens."""

    streams: int
    prompt: int
    answer: int


def pool_load(*, pool: int, seats: int, max_model_len: int, block_size: int, step_tokens: int) -> PoolLoad | str:
    """The load that keeps a pool of so many token slots full; or why this server has none.

    As few requests as can do it fill the pool exactly: most of each is its prompt, whose blocks are taken when it
    enters. Blocks are free from an end to the next step, so answers should be long; and until they are reached, so
    answers should be short: the sum is least at sqrt(2 * length). An answer lasts for the prompts of the others.
    """
    running = math.ceil(pool * _LEAST_REACH / max_model_len)
    if running > seats:
        reach = seats * max_model_len / pool
        return f"{seats} sequences of {max_model_len:,} tokens fill at most {reach:.0%} of the pool's {pool:,}"
    length = min(max_model_len, pool // running // block_size * block_size)
    answer = int(min(max(math.sqrt(2 * length), _SPARE_STEPS * pool / step_tokens), length / 4))
    return PoolLoad(streams=2 * running + 2, prompt=length - answer, answer=answer)


def full_cache_alerts(live: Live) -> list[Fact]:
    """F17: a pool that is kept full raises the alert for it."""
    name = "F17 alerts of a KV cache that is kept full"
    limits = live.debug("steps?limit=1&events=true")["config"]["limits"]
    load = pool_load(
        pool=int(live.label("quire_cache_config_info", "kv_tokens")),
        seats=int(limits["max_num_seqs"]),
        max_model_len=live.max_model_len,
        block_size=live.block_size,
        step_tokens=int(limits["max_num_batched_tokens"]),
    )
    if isinstance(load, str):
        return [not_shown(name, f"{load}; a smaller --kv-memory shows it")]
    over = threading.Event()

    def stream() -> None:
        while not over.is_set():
            try:
                live.complete(live.prompt(load.prompt), load.answer)
            except BenchError:  # the queue is full, as it should be
                time.sleep(0.5)

    with live.watched() as seconds:
        streams = [threading.Thread(target=stream, daemon=True) for _ in range(load.streams)]
        for each in streams:
            each.start()
        filled, deadline = False, time.monotonic() + _FILL_SECONDS
        while time.monotonic() < deadline and _FULL not in _firing(seconds):
            time.sleep(0.5)
            if not filled and _most_used(seconds) > _ALERT_ABOVE:
                filled, deadline = True, time.monotonic() + _OVERLOAD_SECONDS
        over.set()
        for each in streams:
            each.join()
    got = ", ".join(sorted(_firing(seconds))) or "none"
    return [
        Fact(
            name=name,
            expected=_FULL,
            got=f"{got}; at most {_most_used(seconds):.0%} was used",
            ok=_FULL in _firing(seconds),
        )
    ]


def _most_used(seconds: list[dict[str, Any]]) -> float:
    blocks = [second["frame"]["blocks"] for second in seconds]
    return max((each["used"] / each["total"] for each in blocks), default=0.0)


def _firing(seconds: list[dict[str, Any]]) -> set[str]:
    return {alert["name"] for second in seconds for alert in second["alerts"] if alert["firing"]}

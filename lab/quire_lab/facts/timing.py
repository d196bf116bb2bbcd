"""Facts on time and overload: F5, F17, F18.

Promises: the server's own times, of load that is made here. A busy machine only lengthens times, so what is too long
speaks against a server where nothing that was measured beside it explains it; else it is not shown.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from quire_bench.servers import BenchError
from quire_lab.facts.fact import Fact, at_most, not_shown
from quire_lab.facts.live import Live

_REPEATS = 20
_HOPS_MS = 1.0  # that a request and its first token may take between the server's two processes
_RESIDUAL = 5.0  # %
_ALERT_SECONDS = 30.0 + 30.0  # of the window that the alert's value is a mean of, and for which it must hold
_TELLING_SECONDS = 5.0  # for a second's end to be told
_STEADY_SECONDS = 75.0  # a minute's window, and what leads up to it
_FILL_SECONDS, _OVERLOAD_SECONDS = 300.0, 180.0  # until the pool is full; from then on, until the alert
_FULL, _ALERT_ABOVE = "QuireKVCacheFull", 0.9
_LEAST_REACH = 0.97  # share of the pool that the longest requests must be able to fill
_SPARE_STEPS = 1.25  # of an answer, over the steps that the others' prompts take


def first_token_parts(live: Live) -> list[Fact]:
    """F5: the time to the first token is the queue's and the prompt's, of requests that come alone."""
    names = ("time_to_first_token", "request_queue_time", "request_prefill_time")
    stall, probes = (live.gain(f"quire_event_loop_stall_seconds_{part}") for part in ("sum", "count"))
    rests = []
    for _ in range(_REPEATS):
        whole, queue, prefill = (live.gain(f"quire_{name}_seconds_sum") for name in names)
        live.complete(live.prompt(64), 2)
        rests.append(1e3 * (whole() - queue() - prefill()))
    deadline = time.monotonic() + _TELLING_SECONDS
    while not probes() and time.monotonic() < deadline:
        time.sleep(0.1)
    return [beyond_queue_and_prompt(rests, 1e3 * stall() / max(probes(), 1))]


def beyond_queue_and_prompt(rests: Sequence[float], stall: float) -> Fact:
    """Judge what is left of each time to a first token by how late the server's loop ran timers meanwhile, both in ms.

    On a quiet machine the median is short. On a busy one even the shortest is as late as the loop.
    """
    name = "F5 first token beyond queue and prompt, median"
    found, least = median(map(abs, rests)), min(map(abs, rests))
    if found <= _HOPS_MS:
        return at_most(name, _HOPS_MS, found, " ms")
    if least <= _HOPS_MS + 2 * stall:  # the loop has a turn for the request and one for its token
        said = f"{found:.4g} ms; the shortest of {len(rests)} is {least:.4g} ms, and the loop is {stall:.4g} ms late"
        return not_shown(name, said)
    return at_most(f"{name}; the loop is {stall:.4g} ms late, the shortest", _HOPS_MS + 2 * stall, least, " ms")


def littles_law(live: Live) -> list[Fact]:
    """F18: L = lambda W within 5 % after a minute of steady load."""
    over = threading.Event()
    before = live.gain("quire_time_to_first_token_seconds_count")

    def stream(number: int) -> None:
        time.sleep(number * 0.05)
        while not over.is_set():
            live.complete(live.prompt(16), 64)

    streams = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for each in streams:
        each.start()
    time.sleep(_STEADY_SECONDS)
    residual, ended = live.metric("quire_littles_law_residual_ratio"), before() * 60 / _STEADY_SECONDS
    over.set()
    for each in streams:
        each.join()
    return [both_sides_of_littles_law(100 * abs(residual), streams=len(streams), ended=ended)]


def both_sides_of_littles_law(residual: float, *, streams: int, ended: float) -> Fact:
    """The residual in %; the requests of `streams` at a window's two ends are counted on one side alone."""
    name, edges = "F18 residual of Little's law", 200 * streams / max(ended, 1.0)
    if _RESIDUAL < residual <= _RESIDUAL + edges:
        said = f"{residual:.4g} %, of which {edges:.4g} % may be the ends of a minute with {ended:.0f} requests"
        return not_shown(name, said)
    return at_most(name, _RESIDUAL, residual, " %")


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
    used = [each["used"] / each["total"] for each in (second["frame"]["blocks"] for second in seconds)]
    return [full_cache(name, used, _firing(seconds))]


def full_cache(name: str, used: Sequence[float], firing: set[str]) -> Fact:
    """Whether the alert fires; `used`: the share of the pool at each second's end.

    That it does not fire speaks against the server only where the pool stayed full for the alert's time; a slow machine
    or client may leave it emptier than that.
    """
    full = max(
        (sum(1 for _ in same) for above, same in groupby(used, lambda one: one > _ALERT_ABOVE) if above), default=0
    )
    got = f"{', '.join(sorted(firing)) or 'none'}; at most {max(used, default=0.0):.0%} was used"
    if _FULL not in firing and full <= _ALERT_SECONDS + _TELLING_SECONDS:
        return not_shown(name, f"{got}, and more than {_ALERT_ABOVE:.0%} for {full} s without a gap")
    return Fact(name=name, expected=_FULL, got=got, ok=_FULL in firing)


def _most_used(seconds: list[dict[str, Any]]) -> float:
    blocks = [second["frame"]["blocks"] for second in seconds]
    return max((each["used"] / each["total"] for each in blocks), default=0.0)


def _firing(seconds: list[dict[str, Any]]) -> set[str]:
    return {alert["name"] for second in seconds for alert in second["alerts"] if alert["firing"]}

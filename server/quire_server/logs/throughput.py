"""The periodic log line about throughput, queue and cache.

Promises: a line per interval while requests run, and one after they have ended. Must not know: requests.
"""

from __future__ import annotations

import asyncio
import logging
import time

from quire_server.metrics.metrics import Metrics, Throughput

log = logging.getLogger("quire.stats")


async def log_throughput(metrics: Metrics, interval: float, model: str = "") -> None:
    """Log a line every `interval` seconds while requests run, and one after they have ended. Until cancelled.

    `model`: of several, whose name begins the line.
    """
    before, was_active = metrics.throughput(), False
    clock = time.monotonic()
    while True:
        await asyncio.sleep(interval)
        now, elapsed = metrics.throughput(), time.monotonic() - clock
        clock += elapsed
        active = now.running + now.waiting > 0 or now.generated > before.generated or now.computed > before.computed
        if active or was_active:
            log.info("%s%s", f"{model}: " if model else "", throughput_line(before, now, elapsed))
        before, was_active = now, active


def throughput_line(before: Throughput, now: Throughput, seconds: float) -> str:
    """The line in the words of vLLM, which people search logs for."""
    queries = now.queries - before.queries
    hits = f"{100 * (now.hits - before.hits) / queries:.1f}%" if queries else "-"
    return (
        f"Avg prompt throughput: {(now.computed - before.computed) / seconds:.1f} tokens/s,"
        f" Avg generation throughput: {(now.generated - before.generated) / seconds:.1f} tokens/s,"
        f" Running: {now.running} reqs, Waiting: {now.waiting} reqs,"
        f" KV cache usage: {100 * now.usage:.1f}%, Prefix cache hit rate: {hits}"
    )

"""The output rate of a server that is there already, for requests that something else has served.

Promises: the server gets what `quire bench --against` would send it: token ids, exact lengths, no key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from quire_bench.measures import measure
from quire_bench.servers import BenchError, Peer, Server, discover
from quire_bench.workload import Job, LoadPoint

__all__ = ["Job", "Peer", "PeerRate", "peer_rate"]

_TIMEOUT = 600.0
_FIRST = Job(prompt=(1, 2, 3, 4), output_tokens=4)  # before the others: a server may still compile something


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRate:
    """Output tokens a second of a server, with as many streams."""

    name: str
    tokens_per_second: float
    streams: int


def peer_rate(peer: Peer, jobs: Sequence[Job], *, streams: int) -> PeerRate:
    """Send the jobs, so many at once. Raises BenchError where the server does not answer each with its length."""
    return asyncio.run(_measured(peer, jobs, streams))


async def _measured(peer: Peer, jobs: Sequence[Job], streams: int) -> PeerRate:
    info = await discover(peer.url, peer.name, api_key=None, model=None)
    server = Server(info, api_key=None, timeout=_TIMEOUT, temperature=0.0)
    try:
        for some in ([_FIRST], jobs):
            found = measure(await server.run(LoadPoint(mode="concurrency", value=streams), some, None))
            if found.errors or found.wrong_length:
                wrong = found.error_examples[:1] or (f"{found.wrong_length} answers have another length",)
                raise BenchError(f"{info.name} did not answer all {len(some)} requests: {wrong[0]}")
    finally:
        await server.close()
    return PeerRate(name=info.name, tokens_per_second=found.output_tok_s, streams=streams)

"""What others have of a server while something is done to it: streams, /health/live, event loop, memory, answers.

    async with Watch(server.url, pid=server.process.pid) as watch:
        ...                              # do it
        assert not await watch.canary()  # the server answers as it did before
        seen = await watch.seen()        # since the watch began, or since it was last asked
        return str(seen)

Promises: the measuring process is not the one that does the harm; each reading begins where the last one ended.
Must not know: what is done.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

QUIET_SECONDS = 2.0
IDLE_SECONDS = 2.0
CANARY_SECONDS = 60.0
CANARY = {"prompt": "1, 2, 3, 4,", "max_tokens": 6, "temperature": 0, "return_token_ids": True}
STALL = "quire_event_loop_stall_seconds"
_SAMPLE = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was felt. Seconds, bytes and counts."""

    gap: float  # the longest between two pieces of another's stream
    usual: float  # the median of such gaps before anything was done
    live: float  # the slowest answer of /health/live
    live_failures: int
    stall: float  # how long the event loop was held at most, by its own metric: an upper bound
    rss: int  # of the process that listens
    grown: int  # since the watch began
    broken: int  # streams of others that ended without their end
    changed: int  # streams of others that said something else than before
    late: float  # how late the measuring process itself was: noise of the machine

    @property
    def beyond(self) -> float:
        """How much longer than usual another's stream was silent."""
        return max(0.0, self.gap - self.usual)

    def __str__(self) -> str:
        return (
            f"event loop held {self.stall * 1000:.0f} ms, another's stream silent {self.gap * 1000:.0f} ms"
            f" (usually {self.usual * 1000:.0f}), /health/live {self.live * 1000:.0f} ms"
            f" ({self.live_failures} failed), {self.broken} streams broken, {self.changed} changed,"
            f" memory {self.rss // _MIB} MiB ({self.grown / _MIB:+.0f}); noise {self.late * 1000:.0f} ms"
        )


class Scrape:
    """The samples of a text exposition. `scrape("quire_kv_blocks", state="free")`: the sum of all that match."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in text.splitlines():
            if match := _SAMPLE.fullmatch(line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                self._samples.setdefault(match[1], []).append((labels, float(match[3])))

    def __call__(self, name: str, **wanted: str) -> float:
        found = self._samples.get(name, [])
        return sum(value for labels, value in found if wanted.items() <= labels.items())

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """The cumulative counts of a histogram by upper bound."""
        return sorted((float(labels["le"]), value) for labels, value in self._samples.get(f"{name}_bucket", []))


def longest(before: Scrape, after: Scrape, name: str = STALL) -> float:
    """The least upper bound of the largest value that a histogram has got between two scrapes; 0 for none."""
    new: list[tuple[float, float, float]] = []  # lower and upper bound, how many
    lower = above = 0.0
    earlier = dict(before.buckets(name))
    for upper, count in after.buckets(name):
        cumulative = count - earlier.get(upper, 0.0)
        new.append((lower, upper, cumulative - above))
        lower, above = upper, cumulative
    filled = [each for each in new if each[2] > 0]
    if not filled:
        return 0.0
    least = sum(low * count for low, _, count in filled) - filled[-1][0]  # of all others together
    total = after(f"{name}_sum") - before(f"{name}_sum")
    return min(filled[-1][1], max(total - least, filled[-1][0]))


class Watch:
    """`pid` of the server's process for its memory; `headers` where a key is needed; `streams` of others beside."""

    def __init__(
        self,
        url: str,
        *,
        pid: int | None = None,
        headers: dict[str, str] | None = None,
        streams: int = 2,
        tokens: int = 1000,
        quiet: float = QUIET_SECONDS,
    ) -> None:
        self._url = url
        self._process = psutil.Process(pid) if pid is not None else None
        self._headers = headers or {}
        self._streams = streams
        self._tokens = tokens
        self._quiet = quiet
        self._golden: list[int] = []
        self._restarts = 0.0
        self._fresh: Scrape | None = None  # what the canary has just read

    async def __aenter__(self) -> Watch:
        self._http = httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=CANARY_SECONDS)
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__).with_name("bystander.py"))),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            self._golden = await self._answer()
            self._first_rss = self._rss()
            address = urlsplit(self._url)
            await self._ask_child(
                {
                    "host": address.hostname,
                    "port": address.port,
                    "headers": "".join(f"{name}: {value}\r\n" for name, value in self._headers.items()),
                    "streams": self._streams,
                    "tokens": self._tokens,
                    "quiet": self._quiet,
                }
            )
            self._scraped = await self.scrape()
            self._restarts = self._scraped("quire_engine_restarts_total")
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            await asyncio.wait_for(self._child.wait(), 5)
        except TimeoutError:
            self._child.kill()
            await self._child.wait()
        await self._http.aclose()

    async def seen(self) -> Seen:
        """Since the last time, or since the watch began."""
        return await self._seen(await self.scrape())

    async def after(self) -> tuple[list[str], Seen]:
        """`canary` and `seen`, with one look at the metrics less."""
        self._fresh = None
        faults = await self.canary()
        return faults, await self._seen(self._fresh or await self.scrape())

    async def _seen(self, scraped: Scrape) -> Seen:
        stall, self._scraped = longest(self._scraped, scraped), scraped
        felt = await self._ask_child(None)
        rss = self._rss()
        return Seen(
            gap=felt["gap"],
            usual=felt["usual"],
            live=felt["live"],
            live_failures=felt["live_failures"],
            stall=stall,
            rss=rss,
            grown=rss - self._first_rss,
            broken=felt["broken"],
            changed=felt["changed"],
            late=felt["late"],
        )

    async def canary(self) -> list[str]:
        """What is not as it was before, in words: health, a fixed greedy answer, restarts, what is left behind."""
        faults: list[str] = []
        try:
            for path in ("/health/live", "/health/ready"):
                if (status := (await self._http.get(path)).status_code) != 200:
                    faults.append(f"{path} answers {status}")
            if (tokens := await self._answer()) != self._golden:
                faults.append(f"the greedy answer is {tokens}, it was {self._golden}")
            return faults + await self._left_behind()
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            return [*faults, f"no answer: {type(error).__name__} {error}"[:200]]

    async def scrape(self) -> Scrape:
        return Scrape((await self._http.get("/metrics")).text)

    async def _left_behind(self) -> list[str]:
        """Two seconds after it all that runs are the watch's own streams, and every block is accounted for."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            self._fresh = scraped = await self.scrape()
            live = scraped("quire_requests_running") + scraped("quire_requests_waiting")
            blocks = sum(scraped("quire_kv_blocks", state=state) for state in ("used", "cached", "free"))
            faults = []
            if live > self._streams:
                faults.append(f"{live - self._streams:g} requests are left")
            if blocks != scraped("quire_kv_pool_blocks"):
                faults.append(f"{blocks:g} of {scraped('quire_kv_pool_blocks'):g} blocks are accounted for")
            if (restarts := scraped("quire_engine_restarts_total")) != self._restarts:
                return [*faults, f"the engine was restarted {restarts - self._restarts:g} times"]
            if not faults or time.monotonic() > deadline:
                return faults
            await asyncio.sleep(0.05)

    async def _answer(self) -> list[int]:
        reply = await self._http.post("/v1/completions", json=CANARY)
        reply.raise_for_status()
        tokens: list[int] = reply.json()["choices"][0]["token_ids"]
        return tokens

    def _rss(self) -> int:
        return int(self._process.memory_info().rss) if self._process is not None else 0

    async def _ask_child(self, arguments: dict[str, object] | None) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write((json.dumps(arguments) if arguments is not None else "").encode() + b"\n")
        told = await self._child.stdout.readline()
        if not told:
            raise RuntimeError("who measures has ended; its message is above")
        felt: dict[str, Any] = json.loads(told)
        return felt

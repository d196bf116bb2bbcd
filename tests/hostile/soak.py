"""Mixed traffic for a long time: `make soak`, `make soak ARGS="--minutes 5"`. Memory, handles, files, times, answers.

All guests at once: two models, of which one has an adapter and guesses tokens, batches, Ollama's API. Promises: exit
code 1 where memory, descriptors, threads, files or times grow, an answer changes, a server error comes that nobody
asked for, or something is left at the end; four curves are printed with their slopes. Must not know: how each is found.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Values
from pathlib import Path

import httpx
import psutil

from e2e.served import Served
from e2e.streams import client
from hostile.__main__ import facts_of
from hostile.corpus import values
from hostile.corpus.facts import KEY
from hostile.detectors import SLOPE_BYTES, Answered, Sample, judge, look, slope, unexplained
from hostile.traffic import ADAPTER, MODEL, OTHER_MODEL, Traffic
from quire_engine.demo import demo_model_path
from support.adapters import write_adapter

CLIENTS = 6
LOOK_EVERY = 5.0  # seconds
PROBE_EVERY = 1.0
PACE_AROUND = 15.0
SAY_EVERY = 60.0
PARDON = 15.0  # seconds after a kill in which a 503 that says when to come back is right
ENGINE_WARM_UP = 0.2  # of the run, in which an engine's logs fill up to their limits
MOST_FAULTS = 40
# What fills up to a limit, the pool and the step log, is made small: it is full soon, and what grows later is a leak.
FLAGS = ("--max-num-seqs", "8", "--max-num-queued-reqs", "32", "--kv-memory", "32MiB", "--enable-lora")
LIMITS = "step_log=256"
_MIB = 1 << 20
CURVES = (
    ("memory, MiB", "rss", _MIB),
    ("descriptors", "fds", 1),
    ("threads", "threads", 1),
    ("files, KiB", "store", 1024),
)


class Soak:
    """One run against one server."""

    def __init__(self, server: Served, store: Path, *, minutes: float, kill_every: float, warm_up: float) -> None:
        """`store`: the folder of the server's files."""
        self._server, self._store = server, store
        self._dice = random.Random(47)
        self._seconds = minutes * 60
        self._kill_every = kill_every * 60
        self._warm_up = warm_up * 60
        self._process = psutil.Process(server.process.pid)
        self.answers: list[Answered] = []
        self.kills: list[float] = []
        self.samples: list[Sample] = []
        self.engine: dict[int, list[Sample]] = {}  # by process id
        self.times: list[tuple[float, float]] = []
        self.pace: list[tuple[float, float]] = []  # seconds of a fixed computation: how fast, and how free, the host is

    async def run(self) -> list[str]:
        """What is wrong, in words."""
        started = time.monotonic()

        def clock() -> float:
            return time.monotonic() - started

        facts = await facts_of(self._server.url, 9)
        bad = [case for case in values.cases(facts) if case.kind in {"values", "token ids"}]
        async with client(self._server.url) as http:
            http.headers["Authorization"] = f"Bearer {KEY}"
            traffic = Traffic(http, clock, bad, seed=60)
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(self._send(traffic, clock))
                group.create_task(self._probe(traffic, clock))
                group.create_task(self._look(clock))
                group.create_task(self._kill(clock))
                group.create_task(self._say(clock))
        faults = list(judge(self.samples, self._paced_times(), warm_up=self._warm_up))
        faults += self._engine_faults()
        faults += list(unexplained(self.answers, self.kills, pardon=PARDON))[:MOST_FAULTS]
        await asyncio.to_thread(self._rest, faults)
        return faults

    async def _send(self, traffic: Traffic, clock: Callable[[], float]) -> None:
        while clock() < self._seconds:
            self.answers.append(await traffic.one())

    async def _probe(self, traffic: Traffic, clock: Callable[[], float]) -> None:
        while clock() < self._seconds:
            at = clock()
            try:
                self.times.append((at, await traffic.probe()))
            except httpx.HTTPStatusError as error:
                retry_after = "retry-after" in error.response.headers
                status = error.response.status_code
                self.answers.append(Answered(kind="probe", at=at, status=status, retry_after=retry_after))
            await asyncio.sleep(PROBE_EVERY)

    async def _look(self, clock: Callable[[], float]) -> None:
        while clock() < self._seconds:
            engines = await asyncio.to_thread(self._engines)
            apart, store = [each.pid for each in engines], await asyncio.to_thread(_bytes_in, self._store)
            self.samples.append(look(self._process, clock(), without=apart, store=store))
            self.pace.append((clock(), await asyncio.to_thread(_fixed_work)))
            for engine in engines:
                with contextlib.suppress(psutil.NoSuchProcess):  # killed a moment ago
                    self.engine.setdefault(engine.pid, []).append(look(engine, clock()))
            await asyncio.sleep(LOOK_EVERY)

    async def _kill(self, clock: Callable[[], float]) -> None:
        # None is killed in the second half: what an engine's logs hold takes minutes to reach its limit.
        while self._kill_every and clock() + self._kill_every < self._seconds / 2:
            await asyncio.sleep(self._kill_every)
            engines = await asyncio.to_thread(self._engines)
            if engines:
                self.kills.append(clock())
                self._dice.choice(engines).kill()

    def _engines(self) -> list[psutil.Process]:
        """The engines that serve, without a spare process or one that loads: a kill of those is no restart."""
        headers = {"Authorization": f"Bearer {KEY}-admin"}
        told = httpx.get(self._server.url + "/admin/models", headers=headers, timeout=30).json()["models"]
        serving = [each["pid"] for each in told if each["state"] == "loaded"]
        return [psutil.Process(pid) for pid in serving if psutil.pid_exists(pid)]

    async def _say(self, clock: Callable[[], float]) -> None:
        while clock() < self._seconds:
            await asyncio.sleep(min(SAY_EVERY, max(self._seconds - clock(), 0.1)))
            last = self.samples[-1]
            print(
                f"{clock():6.0f} s: {len(self.answers)} requests, {last.rss / _MIB:.0f} MiB, {last.fds} descriptors,"
                f" {last.threads} threads, {len(self.kills)} kills",
                flush=True,
            )

    def _paced_times(self) -> list[tuple[float, float]]:
        """The probes' seconds as on a host that is always as fast as it was at its median: others may use it too."""
        usual = statistics.median(seconds for _, seconds in self.pace)
        ats = [at for at, _ in self.pace]

        def pace(at: float) -> float:
            """Of the half minute around that time."""
            near = self.pace[bisect_left(ats, at - PACE_AROUND) : bisect_left(ats, at + PACE_AROUND)]
            return statistics.median(seconds for _, seconds in near) if near else usual

        return [(at, seconds * usual / pace(at)) for at, seconds in self.times]

    def _engine_faults(self) -> list[str]:
        """The engine's memory grows within its life, once it is warm."""
        grown = []
        for samples in self.engine.values():
            warm = [sample for sample in samples if sample.at > samples[0].at + ENGINE_WARM_UP * self._seconds]
            if len(warm) >= 8:
                grown.append(slope([(sample.at, sample.rss) for sample in warm]))
        if grown and statistics.median(grown) > SLOPE_BYTES:
            return [f"the engine grows by {statistics.median(grown) / _MIB:.2f} MiB a minute"]
        return []

    def _rest(self, faults: list[str]) -> None:
        """What is left when nobody asks for anything."""
        try:
            self._server.wait_idle(5.0)
        except AssertionError as error:
            faults.append(str(error))
        if (restarts := self._server.metric("quire_engine_restarts_total")) != len(self.kills):
            faults.append(f"the engine was killed {len(self.kills)} times and restarted {restarts:g} times")

    def figures(self) -> str:
        warm = [sample for sample in self.samples if sample.at >= self._warm_up]
        timed, paced, work = (
            [seconds * 1000 for at, seconds in found if at >= self._warm_up]
            for found in (self.times, self._paced_times(), self.pace)
        )
        counts = Counter(answer.kind for answer in self.answers)
        statuses = Counter(answer.status for answer in self.answers)
        return "\n".join(
            [
                f"{len(self.answers)} requests: {dict(counts)}",
                f"statuses: {dict(sorted(statuses.items()))} (499: left by its client)",
                *(_curve(name, warm, field, scale) for name, field, scale in CURVES),
                f"median answer {_ends(timed)} ms, by the host's pace {_ends(paced)} ms;"
                f" a fixed computation {_ends(work)} ms",
                f"engine killed {len(self.kills)} times",
            ]
        )


def _curve(name: str, samples: Values[Sample], field: str, scale: float) -> str:
    """A dozen points over the time after the warm-up, and the slope for an hour."""
    taken = [(each.at, getattr(each, field) / scale) for each in samples]
    points = " ".join(f"{value:.1f}".removesuffix(".0") for _, value in taken[:: max(1, len(taken) // 12)])
    return f"{name:<16}{points}  {60 * slope(taken):+.2f} an hour"


def _bytes_in(folder: Path) -> int:
    """What all files below take."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            total += path.stat().st_size
    return total


def _two_models(folder: Path) -> tuple[str, ...]:
    """Flags of a server with all guests, whose files are in the folder."""
    adapter = write_adapter(folder / "adapter", demo_model_path())
    models = folder / "models.yaml"
    models.write_text(
        "models:\n"
        f"- {{model: quire-demo, served_model_name: [{MODEL}], pinned: true, speculation: suffix,"
        f" lora_modules: [{ADAPTER}={adapter}]}}\n"
        f"- {{model: quire-demo, served_model_name: [{OTHER_MODEL}], pinned: true, quantization: int8}}\n"
    )
    (folder / "store").mkdir()
    return "--models", str(models), "--batch-dir", str(folder / "store")


def _ends(values: Values[float]) -> str:
    """The medians of the first and the last quarter."""
    quarter = max(1, len(values) // 4)
    return f"{statistics.median(values[:quarter]):.1f} -> {statistics.median(values[-quarter:]):.1f}"


def _fixed_work() -> float:
    """Seconds of a computation that is always the same, with those in which others had the cores."""
    started, total = time.perf_counter(), 0
    for number in range(400_000):  # longer than a turn that the host gives to one process
        total += number & 7
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--kill-every", type=float, default=4, help="minutes between two kills of the engine; 0: none")
    parser.add_argument("--warm-up", type=float, help="minutes that do not count; default: a quarter, at most five")
    wanted = parser.parse_args()
    warm_up = wanted.warm_up if wanted.warm_up is not None else min(5.0, wanted.minutes / 4)
    keys = ("--api-key", KEY, "--admin-api-key", f"{KEY}-admin")
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as name,
        Served(*FLAGS, *keys, *_two_models(Path(name)), limits=LIMITS, start_seconds=240) as server,
    ):
        soak = Soak(server, Path(name) / "store", minutes=wanted.minutes, kill_every=wanted.kill_every, warm_up=warm_up)
        faults = asyncio.run(soak.run())
        print(soak.figures())
    for fault in faults:
        print(f"BROKEN: {fault}")
    print("nothing grew, nothing was left" if not faults else f"{len(faults)} faults", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

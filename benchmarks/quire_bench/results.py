"""All that a benchmark found out, as one object that JSON holds.

Promises: every round's numbers are kept, so that other statistics can be made of a file later; secrets are not.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from quire_bench.compare import Knee, Spread, knee, ratios, summarise
from quire_bench.limits import Limits, Shares, summarise_shares
from quire_bench.measures import Measures
from quire_bench.servers import KvUse, ServerInfo
from quire_bench.workload import LoadPoint, Workload

SCHEMA = 3
_SECRET = "--api-key"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine where the load was made, and, for servers of this machine, where it was served."""

    processor: str
    cores: int  # usable by this process
    memory_bytes: int
    system: str
    load_average: float  # of the last minute, before the benchmark: what else was running


class Described(msgspec.Struct, frozen=True, kw_only=True):
    """The workload, as it was asked for."""

    input_tokens: str
    output_tokens: str
    prefix_tokens: int
    vocab: int
    seed: int
    requests: int | None
    seconds: float | None
    trace_rows: int
    token_ids: bool  # chunks carried the ids of their tokens


class OnePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One server at one load: every round, and what they come to."""

    server: str
    rounds: list[Measures]
    summary: dict[str, Spread]
    ratios: dict[str, Spread]  # the first server's over this one's; empty for the first itself
    shares: dict[str, Spread]  # of the machine's limits, 0 to 1; empty where they do not apply
    kv: list[KvUse] = []  # of the rounds in which a Quire server told it


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """One load point."""

    point: LoadPoint
    servers: list[OnePoint]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """The whole benchmark."""

    schema: int
    started: str  # UTC
    command: list[str]
    versions: dict[str, str]
    machine: Machine
    workload: Described
    repeat: int
    limits: dict[str, Limits]  # by `ModelFacts.machine`, the best of all rounds
    limits_missing: dict[str, str]  # by server: why its are unknown
    servers: list[ServerInfo]
    points: list[PointResult]
    knees: dict[str, Knee]  # by server; only where a sweep shows one

    def encode(self) -> bytes:
        """Encode the results as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


@dataclass(slots=True, kw_only=True)
class Collected:
    """Runs as they come in: by load point and server, in the order of the rounds."""

    points: Sequence[LoadPoint]
    servers: Sequence[ServerInfo]
    runs: dict[tuple[LoadPoint, str], list[Measures]] = field(default_factory=dict)
    shares: dict[tuple[LoadPoint, str], list[Shares]] = field(default_factory=dict)
    kv: dict[tuple[LoadPoint, str], list[KvUse]] = field(default_factory=dict)

    def add(self, point: LoadPoint, server: str, measures: Measures, kv: KvUse | None = None) -> None:
        self.runs.setdefault((point, server), []).append(measures)
        if kv is not None:
            self.kv.setdefault((point, server), []).append(kv)

    def point_results(self) -> list[PointResult]:
        return [
            PointResult(point=point, servers=[self._one(point, info.name) for info in self.servers])
            for point in self.points
        ]

    def _one(self, point: LoadPoint, server: str) -> OnePoint:
        first = self.servers[0].name
        rounds = self.runs[point, server]
        return OnePoint(
            server=server,
            rounds=rounds,
            summary=summarise(rounds),
            ratios=ratios(self.runs[point, first], rounds) if server != first else {},
            shares=summarise_shares(self.shares.get((point, server), ())),
            kv=self.kv.get((point, server), []),
        )

    def knees(self) -> dict[str, Knee]:
        found = {}
        for info in self.servers:
            one = knee([(point, self.runs[point, info.name]) for point in self.points])
            if one is not None:
                found[info.name] = one
        return found


def describe(workload: Workload, *, token_ids: bool) -> Described:
    return Described(
        input_tokens=str(workload.input),
        output_tokens=str(workload.output),
        prefix_tokens=workload.prefix,
        vocab=workload.vocab,
        seed=workload.seed,
        requests=workload.requests,
        seconds=workload.seconds,
        trace_rows=len(workload.trace),
        token_ids=token_ids,
    )


def describe_machine() -> Machine:
    processor = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        processor=processor,
        cores=cores,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=platform.platform(),
        load_average=os.getloadavg()[0],
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("quire", "torch", "transformers", "uvloop"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def command_line(argv: Sequence[str]) -> list[str]:
    """Return the command line as it was typed, but for the keys."""
    words, hide = ["quire", "bench"], False
    for word in argv:
        name, equals, _ = word.partition("=")
        words.append("***" if hide else f"{name}=***" if name == _SECRET and equals else word)
        hide = word == _SECRET
    return words


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

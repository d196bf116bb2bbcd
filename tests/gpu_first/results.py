"""Results of jobs on one machine: kept in a file as soon as each is known, taken up by a later run, shown as a table.

Promises: the file is whole at any moment; a result says on which device and for which sources it is. Must not know:
how jobs run.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gpu_first.jobs import Job, Part

SCHEMA = 1
FILE = "gpu-first.json"
RECORDED = Path(__file__).parents[2] / "benchmarks" / "gpu" / "results"
PASSED, FAILED, HUNG, CRASHED = "passed", "FAILED", "HUNG", "CRASHED"
NO_TIME, NOT_HERE = "no time", "not here"  # neither is a result of the device: a later run takes the job up
_FINAL = (PASSED, FAILED, HUNG, CRASHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a job. `facts`: what the job itself wrote as JSON; `output`: its end, if it did not pass."""

    job: str
    part: str
    outcome: str
    seconds: float
    summary: str
    started: str  # UTC
    device: str
    sources: str
    output: str = ""
    facts: Any = None


class Results:
    """The results of one folder."""

    def __init__(self, folder: Path, *, device: str, sources: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self.device, self.sources = folder / FILE, device, sources
        self._lock = threading.Lock()
        self._by_job = {each.job: each for each in read(self._path)} if self._path.exists() else {}

    def add(self, result: Result) -> None:
        """Keep a result in place of an earlier one of the same job, and write all of them."""
        with self._lock:
            self._by_job[result.job] = result
            beside = self._path.with_suffix(".part")
            found = {"schema": SCHEMA, "results": [asdict(each) for each in self._by_job.values()]}
            beside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            os.replace(beside, self._path)

    def of(self, job: Job) -> Result | None:
        """The result on this device; None if there is none."""
        found = self._by_job.get(job.name)
        return found if found is not None and found.device == self.device else None

    def is_missing(self, job: Job, *, again: bool = False) -> bool:
        """Whether a job is to run. `again`: also if it did not pass."""
        found = self.of(job)
        if found is None or found.outcome not in _FINAL:
            return True
        return again and found.outcome != PASSED

    def passed(self, part: Part) -> bool:
        return all((found := self.of(job)) is not None and found.outcome == PASSED for job in part.jobs)

    def table(self, parts: Sequence[Part]) -> Iterator[str]:
        """One line a job, in order, and a line with the counts."""
        counts: dict[str, int] = {}
        width = max(len(job.name) for part in parts for job in part.jobs)
        for part in parts:
            yield f"({part.letter}) {part.title}, at most {part.seconds:g} s"
            for job in part.jobs:
                found = self.of(job)
                outcome = NO_TIME if found is None else found.outcome
                counts[outcome] = counts.get(outcome, 0) + 1
                if found is None:
                    yield f"    {job.name:{width}}  {NO_TIME:8}"
                    continue
                other = "" if found.sources == self.sources else "  [of other sources]"
                said = f"{found.outcome:8}  {found.seconds:6.1f} s  {found.summary}{other}"
                yield f"    {job.name:{width}}  {said}".rstrip()
        yield ", ".join(f"{count} {outcome}" for outcome, count in counts.items())


def read(path: Path) -> list[Result]:
    """The results of a file. Raises ValueError for one of another kind."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("schema") != SCHEMA or "results" not in found:
        raise ValueError(f"{path} has no results of gpu-first")
    known = {field.name for field in fields(Result)}
    return [Result(**{name: value for name, value in each.items() if name in known}) for each in found["results"]]


def recorded(folder: Path = RECORDED) -> list[Result]:
    """The results that the repository has, of all devices, the oldest first."""
    found = [each for path in sorted(folder.glob("first-*.json")) for each in read(path)]
    return sorted(found, key=lambda result: result.started)


def passed_somewhere(results: Iterable[Result]) -> frozenset[str]:
    """The names of jobs that passed on some device."""
    return frozenset(result.job for result in results if result.outcome == PASSED)

"""Runs the jobs of all parts, each in a child process with its own limit, and goes on whatever becomes of one.

Promises: no job outlives its limit, nor the limit of its part, nor that of the run; each result is written when its
job ends; a job that the time did not suffice for stays missing. Must not know: what the jobs do.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_first.jobs import FACTS, Job, Part
from gpu_first.results import CRASHED, FAILED, HUNG, NO_TIME, NOT_HERE, PASSED, Result, Results
from support.children import Children, Ended

ROOT = Path(__file__).parents[2]
_LEAST_SECONDS = 1.0  # with less time left no job begins
_OUTPUT = 12_000  # characters of a job that did not pass
_FACTS = 4 << 20  # bytes of a job's own JSON
Tell = Callable[[str], None]


class Run:
    """One run over the parts: what is missing first, and in the time that is left what had too little of it."""

    def __init__(self, results: Results, *, seconds: float, children: Children, tell: Tell) -> None:
        self._results, self._children, self._tell = results, children, tell
        self._deadline = time.monotonic() + seconds

    def all(self, parts: Sequence[Part], *, again: bool = False) -> None:
        """Run every part's missing jobs. `again`: also those that did not pass."""
        for turn in range(2):
            for part in parts:
                jobs = [job for job in part.jobs if self._results.is_missing(job, again=again and turn == 0)]
                jobs = [job for job in jobs if not self._lacks(job, part)]
                if jobs and self._left(self._deadline) >= _LEAST_SECONDS:
                    self._part(part, jobs)

    def _part(self, part: Part, jobs: Sequence[Job]) -> None:
        deadline = min(self._deadline, time.monotonic() + part.seconds)
        self._tell(f"({part.letter}) {part.title}: {len(jobs)} to run, at most {self._left(deadline):.0f} s")
        with ThreadPoolExecutor(part.at_once) as pool:
            list(pool.map(lambda job: self._job(job, part, deadline), jobs))

    def _job(self, job: Job, part: Part, deadline: float) -> None:
        left = self._left(deadline)
        if left < _LEAST_SECONDS:
            return
        started = datetime.now(UTC).isoformat(timespec="seconds")
        with tempfile.TemporaryDirectory(prefix="gpu-first-", ignore_cleanup_errors=True) as folder:
            output, facts = Path(folder, "output"), Path(folder, "facts.json")
            command = [sys.executable, *(str(facts) if word == FACTS else word for word in job.command)]
            ended = self._children.run(
                command,
                seconds=min(job.seconds, left),
                cwd=ROOT,
                environment={**os.environ, **job.environment},
                output=output,
            )
            text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
            outcome = _outcome(ended, job, limited_by_part=left < job.seconds)
            self._add(job, part, outcome, started=started, ended=ended, text=text, facts=_facts(facts))

    def _add(
        self, job: Job, part: Part, outcome: str, *, started: str, ended: Ended, text: str, facts: Any = None
    ) -> None:
        result = Result(
            job=job.name,
            part=part.letter,
            outcome=outcome,
            seconds=round(ended.seconds, 1),
            summary=_summary(job, ended, text),
            started=started,
            device=self._results.device,
            sources=self._results.sources,
            output="" if outcome == PASSED else text[-_OUTPUT:],
            facts=facts,
        )
        self._results.add(result)
        self._tell(f"    {result.seconds:6.1f} s  {outcome:8}  {job.name}  {result.summary}".rstrip())

    def _lacks(self, job: Job, part: Part) -> bool:
        """Whether a module that the job needs is not installed; recorded as such."""
        lacking = [name for name in job.needs if importlib.util.find_spec(name) is None]
        before = self._results.of(job)
        if lacking and (before is None or before.outcome != NOT_HERE):
            now, nothing = datetime.now(UTC).isoformat(timespec="seconds"), Ended(code=0, seconds=0.0)
            self._add(job, part, NOT_HERE, started=now, ended=nothing, text=f"no {', no '.join(lacking)}")
        return bool(lacking)

    def _left(self, deadline: float) -> float:
        return deadline - time.monotonic()


def _outcome(ended: Ended, job: Job, *, limited_by_part: bool) -> str:
    if ended.code is None:
        return NO_TIME if limited_by_part else HUNG
    if ended.code < 0:
        return CRASHED
    return PASSED if ended.code in job.passing else FAILED


def _summary(job: Job, ended: Ended, text: str) -> str:
    """The signal that killed a job, and the line of its output that says most."""
    killed = f"{signal.Signals(-ended.code).name}: " if ended.code is not None and ended.code < 0 else ""
    lines = re.findall(job.summary, text, re.MULTILINE) or re.findall(r"^\s*(\S.*)$", text, re.MULTILINE)
    return killed + " ".join(lines[-1].split())[:160] if lines else killed.rstrip(": ")


def _facts(path: Path) -> Any:
    if not path.exists() or path.stat().st_size > _FACTS:
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError:  # the job ended while it wrote
        return None

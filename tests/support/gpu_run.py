"""`make gpu-test`: everything that needs a GPU, in several processes at once, on a machine with torch and little else.

Promises: says which modules are missing; ends in time, naming what had not; the exit code of the worst.
Must not know: what is tested.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from support.children import Children

ROOT = Path(__file__).parents[2]
NEEDED = ("numpy", "pytest", "safetensors", "tokenizers", "torch", "transformers", "triton")
SECONDS = 510.0  # of the nine minutes that such a machine may be lent for
MOST_AT_ONCE = 8  # processes: each compiles kernels on a core, and takes a GiB of the GPU for its context

_MARK = re.compile(r"\bmark\.gpu\b|^from support\.model_steps import (.*|\([^)]*)\b(CUDA|DEVICES)\b", re.MULTILINE)
LONGEST = "tests/model/test_gpu_engine.py"
LAUNCHER = "tests/kernels/test_triton.py"  # marked too; what it runs are the files below
# The Triton kernels' own tests, but for what looks at machine code, or at a simulator's reports of planted bugs: those
# may write where they should not, after which a GPU's context is lost for all tests that follow.
TRITON_FOLDER = "tests/kernels/triton"
NOT_ON_A_GPU = ("test_audit.py", "test_planted_bugs.py")
NOT_PLANTED = "not planted"
# The tests have torch poison its memory, which is part of its deterministic mode: cuBLAS then asks for the second.
ON_THE_DEVICE = {"QUIRE_TRITON_DEVICE": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process of pytest."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    job: Job
    code: int | None  # None: it was ended, or never began
    seconds: float
    output: str


@functools.cache
def marked() -> tuple[str, ...]:
    """The files with tests marked gpu, but for those that only speak of the mark."""
    paths = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_gpu_run.py")
    names = [str(path.relative_to(ROOT)) for path in paths if _MARK.search(path.read_text(encoding="utf-8"))]
    return tuple(name for name in names if name != LAUNCHER)


def jobs() -> list[Job]:
    """The longest first."""
    names = sorted(path.name for path in (ROOT / TRITON_FOLDER).glob("test_*.py") if path.name not in NOT_ON_A_GPU)
    kernels = [
        Job(
            name=f"{TRITON_FOLDER}/{name}",
            arguments=(f"{TRITON_FOLDER}/{name}", "-k", NOT_PLANTED),
            environment=ON_THE_DEVICE,
        )
        for name in sorted(names, key=lambda name: name != "test_attention_at_length.py")
    ]
    others = [Job(name=path, arguments=(path, "-m", "gpu")) for path in marked()]
    return [job for job in others if job.name == LONGEST] + kernels + [job for job in others if job.name != LONGEST]


def run(work: Sequence[Job], *, seconds: float, at_once: int) -> list[Outcome]:
    """All of it, in the order given; a line each as it ends."""
    deadline, children = time.monotonic() + seconds, Children()
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda job: _run(job, deadline, children), work))


def _run(job: Job, deadline: float, children: Children) -> Outcome:
    started = time.monotonic()
    if started >= deadline:
        return _told(Outcome(job=job, code=None, seconds=0.0, output="not begun"))
    with tempfile.TemporaryDirectory(prefix="gpu-test-", ignore_cleanup_errors=True) as folder:
        output = Path(folder, "output")
        ended = children.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=3", *job.arguments],
            seconds=deadline - started,
            cwd=ROOT,
            environment={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
            | dict(job.environment),
            output=output,
        )
        text = output.read_text(encoding="utf-8", errors="replace")
    return _told(Outcome(job=job, code=ended.code, seconds=ended.seconds, output=text))


def _told(outcome: Outcome) -> Outcome:
    result = {0: "passed", None: "NOT FINISHED"}.get(outcome.code, f"FAILED ({outcome.code})")
    last = next((line for line in reversed(outcome.output.splitlines()) if " in " in line), "").strip("= ")
    print(f"{outcome.seconds:6.1f} s  {result:12}  {outcome.job.name}  {last}", flush=True)
    return outcome


def missing(names: Sequence[str] = NEEDED) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def why_not() -> str | None:
    """Why nothing can be tested here; None where it can."""
    lacking = missing()
    if lacking:
        return f"{sys.executable} has no {', no '.join(lacking)}"
    import torch

    return None if torch.cuda.is_available() else f"torch {torch.__version__} finds no usable GPU"


def describe() -> str:
    import torch

    properties = torch.cuda.get_device_properties(0)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton", "transformers"))
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}; {versions}"


def main(argv: Sequence[str] = ()) -> int:
    """0: all passed, 1: something did not, 2: nothing can be tested here. `--describe` prints the device alone."""
    reason = why_not()
    if reason is not None:
        print(f"gpu-test: {reason}", file=sys.stderr)
        return 2
    print(describe(), flush=True)
    if "--describe" in argv:
        return 0
    at_once = min(MOST_AT_ONCE, len(os.sched_getaffinity(0)))
    outcomes = run(jobs(), seconds=SECONDS, at_once=at_once)
    bad = [outcome for outcome in outcomes if outcome.code != 0]
    for outcome in bad:
        print(f"\n==== {outcome.job.name}\n{outcome.output[-8000:]}")
    print(f"\n{len(outcomes) - len(bad)} of {len(outcomes)} files passed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

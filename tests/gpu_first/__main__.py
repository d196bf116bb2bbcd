"""What a GPU is to show first, in at most ten minutes: `make gpu-first`, with results in a folder and one table.

Promises: what a folder has results of is not run again; nothing is committed; without a GPU it says so in one line.
Must not know: what the jobs do.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpu_first.jobs import CUDA, SIMULATED, Part, parts
from gpu_first.results import FILE, Results, passed_somewhere, recorded
from gpu_first.running import ROOT, Run
from support.children import Children

SECONDS = 570.0  # of ten minutes: what comes before and after takes the rest
FOLDER = ROOT / "build" / "gpu-first"
WHEELS = ROOT / "build" / "gpu-wheels"
TABLE = "gpu-first.txt"
_SOURCES = ("server", "engine", "kernels", "benchmarks", "tests")


def main(argv: Sequence[str] | None = None) -> int:
    """0: all passed, 1: something did not or is missing, 2: there is no GPU or no such part."""
    asked = _parser().parse_args(argv)
    device = SIMULATED if asked.dry_run else CUDA
    chosen = [part for part in parts(device, passed_somewhere(recorded())) if part.letter in asked.parts]
    if asked.plan:
        print("\n".join(plan(chosen)))
        return 0
    if not chosen:
        print(f"gpu-first: no part is called {asked.parts!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-first-") as site:
        install(asked.wheels, Path(site))
        name, why_not = (f"{SIMULATED} device", "") if asked.dry_run else device_name()
        if why_not:
            print(f"gpu-first: {why_not}", file=sys.stderr)
            return 2
        results = Results(asked.results, device=name, sources=sources())
        _say(f"{name}; at most {asked.seconds:g} s; results in {asked.results / FILE}")
        _run(results, chosen, seconds=asked.seconds, again=asked.again)
    table = "\n".join([f"{name}, sources {results.sources}", *results.table(chosen)])
    (asked.results / TABLE).write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}")
    return 0 if all(results.passed(part) for part in chosen) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-first", description="What a GPU is to show first, in ten minutes.")
    parser.add_argument("--dry-run", action="store_true", help="on the simulated device: tiny sizes, no GPU")
    parser.add_argument("--plan", action="store_true", help="print the parts with the time that each may take")
    parser.add_argument("--parts", default="abcdefghij", help="letters of the parts to run [%(default)s]")
    parser.add_argument("--again", action="store_true", help="also what did not pass in an earlier run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit of the whole run [%(default)g]")
    parser.add_argument(
        "--results", type=Path, default=FOLDER, help="folder that is written and taken up [%(default)s]"
    )
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="packages that this machine lacks [%(default)s]")
    return parser


def plan(chosen: Sequence[Part]) -> list[str]:
    """The parts and jobs in their order, with the most seconds that each may take."""
    lines = []
    for part in chosen:
        lines.append(f"({part.letter}) {part.title}: {part.seconds:g} s, {part.at_once} at a time")
        lines += [f"    {job.name}: {job.seconds:g} s" for job in part.jobs]
    return [*lines, f"all parts: {sum(part.seconds for part in chosen):g} s"]


def install(wheels: Path, site: Path) -> None:
    """Unpack carried wheels where this process and its children find them, if there are any."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    done = subprocess.run([*command, "--target", str(site), *found], check=False, stdout=sys.stderr)
    if done.returncode:
        _say(f"the wheels of {wheels} could not be installed; what needs them is left out")
    sys.path.insert(0, str(site))
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [before])])


def device_name() -> tuple[str, str]:
    """The GPU with its versions, or why there is none: asked in a child, so that no context stays here."""
    command = [sys.executable, "-m", "support.gpu_run", "--describe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=90)
    except subprocess.TimeoutExpired:
        return "", "the GPU did not answer within 90 s"
    name = done.stdout.strip()
    return (name, "") if done.returncode == 0 and name else ("", done.stderr.strip()[-2000:] or "no GPU answered")


def sources() -> str:
    """A short digest of the project's Python and C++ sources, by which results of other ones are told apart."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h") and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _run(results: Results, chosen: Sequence[Part], *, seconds: float, again: bool) -> None:
    children = Children()

    def stop(number: int, _: object) -> None:
        children.end_all()
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        Run(results, seconds=seconds, children=children, tell=_say).all(chosen, again=again)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

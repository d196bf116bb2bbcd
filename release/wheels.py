"""Builds the wheel with the kernels of every instruction set of a kind of machine, and the source distribution.

    python release/wheels.py wheel [--machine aarch64] [--out dist]     needs a C++ compiler for the machine
    python release/wheels.py sdist [--out dist]

The libraries are compiled by the same code that compiles them at a first start, so that the loader finds them by their
sources and flags. auditwheel decides the tag: the oldest C library that has all symbols that they use.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hatch_build import FOLDER, MACHINE

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "build" / "kernels"  # what is compiled stays here: a file's name changes with what it is made of


class NotBuilt(RuntimeError):
    """Why there is no distribution, in one line."""


def kernels(machine: str, folder: Path) -> list[Path]:
    """The compiled libraries for a kind of machine, and no others, in `folder`. Raises NotBuilt."""
    command = [
        sys.executable,
        "-m",
        "quire_kernels.cpu.build",
        "--prebuilt",
        "--into",
        str(folder),
        "--machine",
        machine,
    ]
    done = _run(command, {"PYTHONPATH": str(ROOT / "kernels")}, keep_output=True)
    built = [Path(line) for line in done.splitlines()]
    for old in set(folder.glob("*.so")) - set(built):
        old.unlink()
    return built


def wheel(machine: str, out: Path) -> Path:
    """The wheel for a kind of machine, with its honest tag. Raises NotBuilt."""
    folder = KERNELS / machine
    kernels(machine, folder)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        plain = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
        _run(
            [sys.executable, "-m", "pip", "wheel", *plain, "--wheel-dir", temporary, str(ROOT)],
            {FOLDER: str(folder), MACHINE: machine},
        )
        (built,) = Path(temporary).glob("*.whl")
        tools = {"PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])}
        repaired = Path(temporary, "repaired")
        _run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(repaired), str(built)], tools)
        (tagged,) = repaired.glob("*.whl")
        for old in out.glob(f"quire-*linux_*_{machine}.whl"):
            old.unlink()
        target = out / tagged.name
        target.write_bytes(tagged.read_bytes())
    return target


def sdist(out: Path) -> Path:
    """The source distribution. Raises NotBuilt."""
    out.mkdir(parents=True, exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.tar.gz")}
    _run([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(out)], {})
    (made,) = (path for path in out.glob("*.tar.gz") if before.get(path) != path.stat().st_mtime_ns)
    return made


def _run(command: Sequence[str], variables: Mapping[str, str], *, keep_output: bool = False) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotBuilt(f"{' '.join(command[1:4])} ended with {done.returncode}\n{done.stdout}".rstrip())
    if not keep_output and done.stdout:
        print(done.stdout, file=sys.stderr, end="")
    return done.stdout


def main(argv: Sequence[str]) -> int:
    """Build what is asked for and print its path; the exit code."""
    parser = argparse.ArgumentParser(prog="wheels.py", description="Build a distribution of Quire.")
    parser.add_argument("what", choices=("wheel", "sdist"))
    parser.add_argument("--machine", default=platform.machine(), help="kind of machine [this one]")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder [dist]")
    given = parser.parse_args(argv)
    try:
        print(sdist(given.out) if given.what == "sdist" else wheel(given.machine, given.out))
    except NotBuilt as error:
        print(f"wheels.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

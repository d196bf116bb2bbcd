"""Installs what constraints.txt pins, each file held against its hashes, and names what the pins are made from.

    python release/locked.py install GROUP... [-- PIP'S ARGUMENTS]     into the environment of this Python
    python release/locked.py download FOLDER GROUP... [-- ARGUMENTS]   the same files, as wheels in a folder
    python release/locked.py names                                     every requirement, for `make lock`

A group is `project`, `build` (the build backend), or a name of pyproject.toml's optional dependencies or dependency
groups. pip checks hashes only where each package of a list has one, and the list depends on the machine and on its
build of torch. So pip resolves the list by the pinned versions alone, and installs it by their hashes, some packages
at a time with a line for each part, since all of them take minutes.

pip alone cannot: --require-hashes takes no hashes from a constraints file, and as a requirements file the lock would
install every group's packages and CUDA's libraries beside a CPU's torch. uv could, but reads nothing of pip's
configuration, where mirrors, private indices and torch's own index are named.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Built for CPUs or other CUDAs by their own index, under a local version (2.13.0+cpu) that the public index refuses
# to all: the lock cannot know those files, so pip's configuration vouches for them, and for no other package.
OWN_BUILDS = ("torch",)
AT_ONCE = 16  # packages that one line of the progress names
PIN = re.compile(r"^([\w.-]+)==([\w.!+-]+)([^\n\\]*)((?:\\\n\s*--hash=\S+\s*)*)", re.MULTILINE)


class NotLocked(RuntimeError):
    """A package that would be installed is not in the lock; names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A line of the lock; `hashes` are those of all its files, for every platform."""

    requirement: str  # with its version and marker
    hashes: tuple[str, ...]  # "sha256:..."


def read_pins(lock: str) -> dict[tuple[str, str], Pin]:
    """The lock's pins by normalised name and version."""
    return {
        (normal(name), version): Pin(
            requirement=f"{name}=={version}{marker.rstrip()}", hashes=tuple(re.findall(r"--hash=(\S+)", hashes))
        )
        for name, version, marker, hashes in PIN.findall(lock)
    }


def wanted(project: Path, groups: Sequence[str] | None = None) -> list[str]:
    """The requirements of some groups of a pyproject.toml, or of all that the lock is for."""
    parsed = tomllib.loads(project.read_text(encoding="utf-8"))
    named = {
        **parsed["project"].get("optional-dependencies", {}),
        **parsed.get("dependency-groups", {}),
        "project": parsed["project"].get("dependencies", []),
        "build": parsed["build-system"]["requires"],
    }
    if groups is None:  # flash is compiled on the user's machine against its torch, Ray's version is the cluster's
        groups = [name for name in named if name not in ("flash", "ray")]
    return [requirement for group in groups for requirement in named[group]]


def hashed(resolved: Iterable[tuple[str, str]], pins: dict[tuple[str, str], Pin]) -> tuple[list[str], list[str]]:
    """Lines of a requirements file with the lock's hashes, and builds of one's own, for the names and versions.

    Raises NotLocked.
    """
    lines, own = [], []
    for name, version in ((normal(name), version) for name, version in resolved):
        public, _, label = version.partition("+")
        if label and name in OWN_BUILDS and (name, public) in pins:
            own.append(f"{name}=={version}")
            continue
        pin = pins.get((name, version))
        if pin is None or not pin.hashes:
            raise NotLocked(f"{name} {version} is not in the lock with a hash; `make lock` writes it")
        lines.append(" ".join([f"{name}=={version}", *(f"--hash={value}" for value in pin.hashes)]))
    return lines, own


def install(project: Path, lock: Path, groups: Sequence[str], arguments: Sequence[str]) -> int:
    """Install groups into this Python's environment, by hashes; pip's exit code. Raises NotLocked."""
    return _by_hashes(project, lock, groups, arguments, command=("install",))


def download(project: Path, lock: Path, folder: Path, groups: Sequence[str], arguments: Sequence[str]) -> int:
    """Put the wheels that `install` takes in an empty environment into a folder; pip's exit code. Raises NotLocked."""
    binary = ("--only-binary", ":all:")
    planning = (
        "--ignore-installed",
        "--target",
        str(folder),
        *binary,
    )  # pip plans for another machine in a folder only
    command = ("download", "--dest", str(folder), *binary)
    return _by_hashes(project, lock, groups, arguments, command=command, planning=planning)


def _by_hashes(
    project: Path,
    lock: Path,
    groups: Sequence[str],
    arguments: Sequence[str],
    *,
    command: Sequence[str],
    planning: Sequence[str] = (),
) -> int:
    pins = read_pins(lock.read_text(encoding="utf-8"))
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        versions, report, files = (Path(folder, name) for name in ("versions.txt", "report.json", "files.txt"))
        versions.write_text("\n".join(pin.requirement for pin in pins.values()), encoding="utf-8")
        _say(f"{command[0]}: finding the pinned packages of {', '.join(groups)}")
        plan = ("--dry-run", *planning, "--report", str(report), "--constraint", str(versions))
        if code := _pip("install", *plan, *wanted(project, groups), *arguments):
            return code
        found = [each["metadata"] for each in json.loads(report.read_text(encoding="utf-8"))["install"]]
        lines, own = hashed(((each["name"], each["version"]) for each in found), pins)
        if own:
            _say(f"{', '.join(own)}: not the public index's, taken as pip's configuration has it")
            if code := _pip(*command, "--no-deps", *own, *arguments):
                return code
        for at, part in enumerate(_parts(lines)):
            names = ", ".join(line.partition("==")[0] for line in part)
            _say(f"{command[0]}: {min(len(lines), (at + 1) * AT_ONCE)} of {len(lines)} packages: {names}")
            files.write_text("\n".join(part), encoding="utf-8")
            by_hash = ("--require-hashes", "--no-deps", "--requirement", str(files))
            if code := _pip(*command, *by_hash, *arguments):
                return code
        _say(f"{command[0]}: {len(lines) + len(own)} packages in {time.monotonic() - started:.0f} s")
        return 0


def _parts(lines: Sequence[str]) -> list[Sequence[str]]:
    return [lines[start : start + AT_ONCE] for start in range(0, len(lines), AT_ONCE)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _pip(*arguments: str) -> int:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check", *arguments[1:]]
    return subprocess.run(command, check=False).returncode


def normal(name: str) -> str:
    """A package's name as indices compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main(argv: Sequence[str]) -> int:
    """Run one of the commands; the exit code."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="locked.py", usage="locked.py install GROUP... [-- PIP'S ARGUMENTS] | ...")
    parser.add_argument("command", choices=("install", "download", "names"))
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--project", type=Path, default=ROOT / "pyproject.toml")
    parser.add_argument("--lock", type=Path, default=ROOT / "constraints.txt")
    given = parser.parse_args(argv[:split])
    if given.command == "names":
        print(*wanted(given.project), sep="\n")
        return 0
    try:
        if given.command == "download":
            folder, *groups = given.groups
            return download(given.project, given.lock, Path(folder), groups, argv[split + 1 :])
        return install(given.project, given.lock, given.groups, argv[split + 1 :])
    except NotLocked as error:
        print(f"locked.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

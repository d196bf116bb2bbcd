"""Puts a release together in dist/ and checks it, without a network: `make release`.

    python release/releasing.py [--trial] [--out dist]

The wheel and quire.cdx.json are there already. Added are the source distribution, the changelog's entry and checksums.
A trial takes the changelog's Unreleased entry where the version has none of its own yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from locked import normal, read_pins
from wheels import ROOT, NotBuilt, sdist

SUMS = "SHA256SUMS"


class NotReleasable(RuntimeError):
    """What is wrong with the release, in one line with a remedy."""


def changes(changelog: str, version: str, *, trial: bool) -> str:
    """The changelog's entry of a version. Raises NotReleasable."""
    entries: dict[str, str] = dict(
        re.findall(r"^## \[([^]]+)\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    )
    dated = re.findall(r"^## \[([^]]+)\] - \d{4}-\d{2}-\d{2}$", changelog, re.MULTILINE)
    if version in entries:
        if version not in dated:
            raise NotReleasable(
                f"CHANGELOG.md: the entry of {version} has no date; write `## [{version}] - YYYY-MM-DD`"
            )
        if re.search(r"^- ", entries.get("Unreleased", ""), re.MULTILINE):
            raise NotReleasable(
                f"CHANGELOG.md: Unreleased is not empty; move its lines to {version} or a later version"
            )
        found = entries[version]
    elif trial:
        found = entries.get("Unreleased", "")
    else:
        raise NotReleasable(
            f"CHANGELOG.md has no entry `## [{version}] - YYYY-MM-DD`; give Unreleased that title, or try with TRIAL=1"
        )
    if not re.search(r"^- ", found, re.MULTILINE):
        raise NotReleasable(f"CHANGELOG.md: the entry of {version} says nothing")
    return found.strip() + "\n"


def check_sdist(path: Path) -> None:
    """A wheel that is built from the source distribution is the tree's own. Raises NotReleasable."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
        (unpacked,) = Path(folder).iterdir()
        theirs, ours = (_pure_wheel(source, Path(folder, name)) for source, name in ((unpacked, "a"), (ROOT, "b")))
    if theirs != ours:
        differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        raise NotReleasable(f"{path.name}: a wheel made from it differs in {', '.join(differing[:5])}")


def _pure_wheel(source: Path, out: Path) -> dict[str, bytes]:
    plain = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "wheel", *plain, "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"no wheel can be made from {source}: {done.stderr.strip()}")
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


def check_parts(path: Path, version: str, lock: str, requirements: Sequence[str]) -> None:
    """A list of parts has the package, and each of its requirements as the lock pins it. Raises NotReleasable."""
    listed = json.loads(path.read_text(encoding="utf-8"))
    own = listed.get("metadata", {}).get("component", {})
    if (listed.get("bomFormat"), own.get("name"), own.get("version")) != ("CycloneDX", "quire", version):
        raise NotReleasable(f"{path.name} is no list of the parts of quire {version}; `make sbom` writes it")
    parts = {normal(part["name"]): part["version"].partition("+")[0] for part in listed["components"]}
    pins = read_pins(lock)
    for requirement in requirements:
        name = normal(re.split(r"[^\w.-]", requirement)[0])
        if (name, parts.get(name, "")) not in pins:
            raise NotReleasable(
                f"{path.name}: {name} is {parts.get(name, 'not there')}, which the lock does not pin; run `make sbom`"
                " in an environment of `make serve`"
            )


def write_sums(out: Path, files: Sequence[Path]) -> Path:
    """SHA256SUMS of the files, as `sha256sum --check` reads it."""
    sums = out / SUMS
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(files))
    sums.write_text("".join(lines), encoding="utf-8")
    return sums


def release(out: Path, *, trial: bool) -> list[Path]:
    """Put the release together; its files. Raises NotReleasable, NotBuilt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = str(project["version"])
    entry = changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, trial=trial)
    wheels = sorted(out.glob(f"quire-{version}-py3-none-manylinux_*.whl"))
    if not wheels:
        raise NotReleasable(f"there is no wheel of {version} in {out}; `make wheel` builds it")
    source = sdist(out)
    check_sdist(source)
    notes, parts = out / f"CHANGES-{version}.md", out / f"quire-{version}.cdx.json"
    notes.write_text(entry, encoding="utf-8")
    made = ROOT / "quire.cdx.json"
    if not made.exists():
        raise NotReleasable("there is no quire.cdx.json; `make sbom` writes it")
    check_parts(made, version, (ROOT / "constraints.txt").read_text(encoding="utf-8"), project["dependencies"])
    parts.write_bytes(made.read_bytes())
    files = [*wheels, source, notes, parts]
    return [*files, write_sums(out, files)]


def main(argv: Sequence[str]) -> int:
    """Print the release's files; the exit code."""
    parser = argparse.ArgumentParser(prog="releasing.py", description="Put a release together and check it.")
    parser.add_argument("--trial", action="store_true", help="take the changelog's Unreleased entry")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder [dist]")
    given = parser.parse_args(argv)
    try:
        files = release(given.out, trial=given.trial)
    except (NotReleasable, NotBuilt) as error:
        print(f"releasing.py: {error}", file=sys.stderr)
        return 1
    for path in files:
        print(f"{path.stat().st_size:>12,}  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

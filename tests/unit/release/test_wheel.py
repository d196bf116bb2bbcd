"""The wheel has what the repository has in its packages, byte for byte, and nothing besides."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a wheel that is built here, by their names in it."""
    folder = tmp_path_factory.mktemp("wheel")
    words = ("wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    subprocess.run([sys.executable, "-m", "pip", *map(str, words)], check=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as files:
        return {name: files.read(name) for name in files.namelist()}


def in_the_repository() -> dict[str, bytes]:
    """The files that git knows, or would, under the names that the wheel gives their folders."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    sources = build["targets"]["wheel"]["sources"]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *sources]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {
        package + name.removeprefix(folder): (ROOT / name).read_bytes()
        for folder, package in sources.items()
        for name in listed
        if name.startswith(folder + "/") and (ROOT / name).exists()
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only git knows what of the tree is the project's")
def test_the_wheel_is_the_repository(wheel: dict[str, bytes]) -> None:
    ours = {name: text for name, text in wheel.items() if not name.startswith("quire-")}
    expected = in_the_repository()
    assert len(expected) > 300
    assert sorted(ours) == sorted(expected)
    assert [name for name in ours if ours[name] != expected[name]] == []


def test_nothing_of_it_runs_when_python_starts(wheel: dict[str, bytes]) -> None:
    assert not [name for name in wheel if name.endswith(".pth") or "customize" in name or ".data/" in name]
    (info,) = {name.partition("/")[0] for name in wheel if name.startswith("quire-")}
    metadata = {name.removeprefix(info + "/") for name in wheel if name.startswith(info)}
    assert metadata == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert wheel[f"{info}/entry_points.txt"].split() == [*b"[console_scripts] quire = quire_server.cli:program".split()]

"""What constraints.txt pins is installed by its hashes, and by nothing else."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from locked import NotLocked, Pin, hashed, main, read_pins, wanted
from support.covering import few

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / "constraints.txt").read_text(encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project that needs `tiny`, and a folder with tiny's wheel."""
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\n[project]\nname = "mine"\nversion = "1"\ndependencies = ["tiny>=1"]\n'
    )
    with zipfile.ZipFile(tmp_path / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return tmp_path


def install(project: Path, lock: str) -> subprocess.CompletedProcess[str]:
    (project / "lock.txt").write_text(lock)
    words = ("install", "project", "--project", project / "pyproject.toml", "--lock", project / "lock.txt")
    pip = ("--no-index", "--find-links", project, "--target", project / "site")
    command = [sys.executable, str(ROOT / "release/locked.py"), *map(str, words), "--", *map(str, pip)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_file_with_its_hash_is_installed(project: Path) -> None:
    digest = hashlib.sha256((project / "tiny-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    done = install(project, f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{digest}\n")
    assert done.returncode == 0, done.stderr
    assert (project / "site/tiny.py").exists()
    assert "install: 1 of 1 packages: tiny\n" in done.stderr, "which part is being installed"
    assert "install: 1 packages in " in done.stderr


def test_a_file_with_another_hash_is_not(project: Path) -> None:
    done = install(project, f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (project / "site/tiny.py").exists()


@pytest.mark.parametrize("lock", few(["", "tiny==1.0\n"], "tiny==1.0\n"), ids=["not pinned", "without a hash"])
def test_what_the_lock_does_not_know_is_not_installed(project: Path, lock: str) -> None:
    done = install(project, lock)
    assert (done.returncode, done.stderr.splitlines(keepends=True)[-1]) == (
        1,
        "locked.py: tiny 1.0 is not in the lock with a hash; `make lock` writes it\n",
    )
    assert not (project / "site").exists()


def test_a_build_of_ones_own_is_taken_by_its_version_for_torch_alone() -> None:
    """An index of torch's own serves 2.0+cpu and 2.0+cu126 under hashes that the public index does not have."""
    pins = {(name, "2.0"): Pin(requirement=f"{name}==2.0", hashes=("sha256:public",)) for name in ("torch", "numpy")}
    assert hashed([("torch", "2.0")], pins) == (["torch==2.0 --hash=sha256:public"], [])
    assert hashed([("torch", "2.0+cu126"), ("NumPy", "2.0")], pins) == (
        ["numpy==2.0 --hash=sha256:public"],
        ["torch==2.0+cu126"],
    )
    for name, version in (("torch", "2.1+cpu"), ("numpy", "2.0+mine")):
        with pytest.raises(NotLocked, match=re.escape(f"{name} {version} is not in the lock")):
            hashed([(name, version)], pins)


def test_every_pin_has_hashes_and_every_requirement_a_pin(capsys: pytest.CaptureFixture[str]) -> None:
    pins = read_pins(LOCK)
    assert all(pin.hashes for pin in pins.values())
    assert LOCK.count("--hash=sha256:") == sum(len(pin.hashes) for pin in pins.values()), "no line is passed over"
    pinned = dict(pins.keys())
    assert main(["names"]) == 0
    for line in capsys.readouterr().out.splitlines():
        asked = Requirement(line)
        assert pinned[canonicalize_name(asked.name)] in asked.specifier, line


def test_the_lock_names_no_index_and_no_path() -> None:
    assert not re.search(r"https?:|file:|--(?:extra-)?index|--find-links|/", LOCK.replace("# This file", ""))


def test_groups_are_what_pyproject_names() -> None:
    groups = {group: wanted(ROOT / "pyproject.toml", [group]) for group in ("build", "project", "dev", "sbom")}
    assert any(line.startswith("hatchling") for line in groups["build"])
    assert any(line.startswith("torch") for line in groups["project"])
    assert not any("flash-attn" in line for line in wanted(ROOT / "pyproject.toml"))

"""A release is put together or refused with what to do: the changelog's entry, the list of parts, the checksums."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from releasing import NotReleasable, changes, check_parts, write_sums

ROOT = Path(__file__).parents[3]
LOG = (
    "# Changelog\n\n## [Unreleased]\n{new}\n## [0.2.0] - 2026-01-02\n\n### Added\n\n- Two.\n\n"
    "## [0.1.0] - 2026-01-01\n\n- One.\n"
)


def test_the_entry_of_a_version() -> None:
    assert changes(LOG.format(new=""), "0.2.0", trial=False) == "### Added\n\n- Two.\n"
    assert changes(LOG.format(new=""), "0.1.0", trial=True) == "- One.\n"
    assert changes(LOG.format(new="\n- Three.\n"), "0.3.0", trial=True) == "- Three.\n"


@pytest.mark.parametrize(
    ("log", "version", "trial", "message"),
    [
        (LOG.format(new="\n- Three.\n"), "0.3.0", False, "no entry `## [0.3.0] - YYYY-MM-DD`"),
        (LOG.format(new="\n- Three.\n"), "0.2.0", False, "Unreleased is not empty"),
        (LOG.format(new=""), "0.3.0", True, "says nothing"),
        ("## [0.1.0]\n\n- One.\n", "0.1.0", False, "has no date"),
        ("## [0.1.0] - 2026-01-01\n\n", "0.1.0", False, "says nothing"),
    ],
)
def test_an_entry_that_is_not_there(log: str, version: str, trial: bool, message: str) -> None:
    with pytest.raises(NotReleasable) as caught:
        changes(log, version, trial=trial)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_our_changelog_can_be_tried() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert "- " in changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version, trial=True)


PARTS = {
    "bomFormat": "CycloneDX",
    "metadata": {"component": {"name": "quire", "version": "0.1.0"}},
    "components": [{"name": "Tiny_Part", "version": "1.0+cpu"}, {"name": "other", "version": "2"}],
}
LOCK = "tiny-part==1.0 \\\n    --hash=sha256:00\n"


def test_the_parts(tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    file.write_text(json.dumps(PARTS))
    check_parts(file, "0.1.0", LOCK, ["tiny-part[fast]>=1; sys_platform == 'linux'"])
    for version, requirements, message in (
        ("0.1.1", ["tiny-part"], "is no list of the parts of quire 0.1.1"),
        ("0.1.0", ["other>=2"], "other is 2, which the lock does not pin"),
        ("0.1.0", ["third"], "third is not there"),
    ):
        with pytest.raises(NotReleasable, match=message):
            check_parts(file, version, LOCK, requirements)


def test_the_checksums_are_those_that_sha256sum_reads(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("b.whl", "a.tar.gz")]
    for path in files:
        path.write_text(path.name)
    sums = write_sums(tmp_path, files)
    check = ["sha256sum", "--check", "--strict", sums.name]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    files[0].write_text("changed")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1

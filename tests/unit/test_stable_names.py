"""No name that a version has promised is gone: commands, flags, settings, metrics, routes, fields and error codes."""

from __future__ import annotations

import copy
import json

import pytest

from support.documents import section
from support.stable_names import FOLDER, KINDS, Names, broken, era, main, missing, present, recorded, version


@pytest.fixture(scope="module")
def now() -> Names:
    return present()


def test_every_promise_is_kept(now: Names) -> None:
    lines = broken(recorded(), now, version())  # nothing is promised before the first release records its names
    assert not lines, "\n".join(lines)


def test_the_names_are_there_in_number(now: Names) -> None:
    assert {
        kind: len(names) >= least for (kind, names), least in zip(now.items(), LEAST, strict=True)
    } == dict.fromkeys(KINDS, True)


LEAST = (15, 300, 50, 80, 60, 300, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_is_gone_is_told_with_what_to_do(kind: str, now: Names) -> None:
    changed = copy.deepcopy(now)
    gone = changed[kind].pop(len(changed[kind]) // 2)
    (line,) = broken({"0.1.0": now}, changed, "0.1.7")
    assert line.startswith(f"{gone} ({KINDS[kind]}) was promised by 0.1.0 and is gone.")
    for text in ("pyproject.toml", "CHANGELOG.md", "begins with 0.1:", "stable_names/0.1.0.json"):
        assert text in line
    assert "\n" not in line
    assert broken({"0.1.0": now}, changed, "0.2.0") == []  # another era may take names away
    assert broken({"0.1.0": changed}, now, "0.1.7") == []  # and every version may add some
    assert missing(changed, now) == [f"{gone} ({KINDS[kind]})"]


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [("0.1.0", "0.1.9", True), ("0.1.0", "0.2.0", False), ("1.2.0", "1.9.3", True), ("1.2.0", "2.0.0", False)],
)
def test_which_versions_a_promise_holds_for(first: str, second: str, is_same: bool) -> None:
    assert (era(first) == era(second)) is is_same


@pytest.mark.matrix  # in `make release`
def test_the_program_records_and_checks(tmp_path, monkeypatch, capsys: pytest.CaptureFixture[str], now: Names) -> None:
    monkeypatch.setattr("support.stable_names.FOLDER", tmp_path)
    monkeypatch.setattr("support.stable_names.recorded", lambda: recorded(tmp_path))
    assert main(["--check"]) == 1
    assert "serve (a command of `quire`) is not in the record" in capsys.readouterr().err
    assert main([]) == 0
    assert main(["--check"]) == 0
    assert json.loads((tmp_path / f"{version()}.json").read_text()) == now


def test_the_documents_say_what_is_promised() -> None:
    promise = section("docs/install.md", "What stays")
    assert FOLDER.relative_to(FOLDER.parents[2]).as_posix() in promise
    assert "before 1.0 the second number" in promise

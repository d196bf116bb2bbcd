"""The shares of service classes as flags, variables and files give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire_engine.contract.limits import LeastShares
from quire_server.flags import parse_flags
from quire_server.settings import Settings, SettingsError

ASKED = LeastShares(interactive=0.7, batch=0.1)
TEXT = "interactive=0.7,batch=0.1"


@pytest.mark.parametrize("line", [f"class-share: {TEXT}", "class_share: {interactive: 0.7, batch: 0.1}"])
def test_shares_come_from_every_source(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text(line)
    assert parse_flags(["--class-share", TEXT]).limits.class_share == ASKED
    assert parse_flags(["--config", str(file)]).limits.class_share == ASKED
    assert Settings().limits.class_share == LeastShares()
    monkeypatch.setenv("QUIRE_CLASS_SHARE", TEXT)
    assert parse_flags([]).limits.class_share == ASKED


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.7", "expected interactive=SHARE,batch=SHARE, such as interactive=0.7,batch=0.1 .got '0.7'"),
        ("batch=0.6", "the share batch=0.6 must be at most 0.5"),
        ("interactive=0.95", "the shares add up to 1.05, must be at most 1"),
    ],
)
def test_a_wrong_text_gets_one_line(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=f"^--class-share: {words}") as raised:
        parse_flags([f"--class-share={text}"])
    assert len(raised.value.lines) == 1

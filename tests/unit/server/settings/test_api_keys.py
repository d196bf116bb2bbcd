"""API keys: names, files, variables; nothing that was meant to close a server leaves it open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire_engine.contract.errors import ConfigError
from quire_server.flags import parse_command_line, parse_flags
from quire_server.settings import Settings, SettingsError
from quire_server.settings.keys import ApiKey, parse_key, sent_key


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_")):
            monkeypatch.delenv(name)


def keys(*argv: str) -> list[tuple[str, str]]:
    return [(key.name, key.key) for key in parse_flags(argv).keys]


def refusal(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_flags(argv)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "key"),
    [
        ("plain", "", "plain"),
        ("alice=0123456789", "alice", "0123456789"),
        ("alice=0123=456789", "alice", "0123=456789"),
        ("=alice=0123456789", "", "alice=0123456789"),
        ("=short", "", "short"),
        ("=@short", "", "@short"),
        ("c2VjcmV0==", "", "c2VjcmV0=="),
        ("c2VjcmV0LWtleQ=", "", "c2VjcmV0LWtleQ="),
        ("a/b=0123456789", "", "a/b=0123456789"),
        ("0name=0123456789", "", "0name=0123456789"),
        ("n" * 33 + "=0123456789", "", "n" * 33 + "=0123456789"),
    ],
)
def test_what_is_a_name_and_what_is_a_key(text: str, name: str, key: str):
    assert parse_key(text) == ApiKey(name=name, key=key)


@pytest.mark.parametrize("text", ["", " ", "="])
def test_an_empty_key_is_refused(text: str):
    assert "is empty" in refusal("--api-key", text)


def test_a_short_key_after_a_name_is_refused_without_being_shown():
    message = refusal("--api-key", "alice=sesame")
    assert "=KEY" in message
    assert "sesame" not in message


def test_keys_are_never_printed():
    settings = Settings(api_key=("alice=0123456789",), ssl_keyfile_password="sesame")
    assert "0123456789" not in repr(settings) + repr(settings.keys)
    assert "sesame" not in repr(settings)


def test_a_file_adds_to_the_flag(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("# all of them\n\n bob=0123456789 \nplain\n")
    assert keys("--api-key", "a", f"@{file}") == [("", "a"), ("bob", "0123456789"), ("", "plain")]


def test_a_command_sends_the_key_alone(tmp_path: Path):
    (tmp_path / "keys").write_text("# all\nbob=0123456789\nplain\n")
    sent = {text: sent_key(text, "--api-key") for text in ("", "plain", "bob=0123456789", f"@{tmp_path}/keys")}
    assert list(sent.values()) == ["", "plain", "0123456789", "0123456789"]
    with pytest.raises(ConfigError, match="--api-key @/no/file: cannot be read"):
        sent_key("@/no/file", "--api-key")


def test_a_file_that_would_open_the_server_is_refused(tmp_path: Path):
    file = tmp_path / "keys"
    assert f"--api-key @{file}: cannot be read" in refusal("--api-key", f"@{file}")
    file.write_text("# nobody\n")
    assert "there is no key in it" in refusal("--api-key", f"@{file}")
    file.write_bytes(b"\xff\xfe")
    assert "UTF-8" in refusal("--api-key", f"@{file}")


def test_vllms_variable_closes_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("VLLM_API_KEY", "name=a,b c\n")
    assert keys() == [("", "name=a,b c")]
    file = tmp_path / "quire.yaml"
    file.write_text("api-key: [from-the-file]\n")
    assert keys("--config", str(file)) == [("", "name=a,b c")]
    assert keys("--api-key", "flag") == [("", "flag")]
    monkeypatch.setenv("QUIRE_API_KEY", "ours")
    assert keys() == [("", "ours")]


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "QUIRE_API_KEY"])
@pytest.mark.parametrize("value", ["", " ", ",", "[]", '""'])
def test_an_empty_variable_does_not_open_the_server(monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    assert refusal().startswith(name)
    assert keys("--api-key", "flag") == [("", "flag")]


def test_the_operators_keys_are_written_as_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "keys"
    file.write_text("# people\nops=0123456789\n")
    settings = parse_flags(["--admin-api-key", "sesame", f"@{file}"])
    assert [(key.name, key.key) for key in settings.admin_keys] == [("", "sesame"), ("ops", "0123456789")]
    assert settings.keys == ()
    assert "sesame" not in repr(settings)
    assert "sesame" not in refusal("--admin-api-key", "sesame", "", "--port", "x")
    assert "--admin-api-key @" in refusal("--admin-api-key", f"@{tmp_path}/nothing")
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "from-outside")
    assert [key.key for key in parse_flags([]).admin_keys] == ["from-outside"]
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "")
    assert "QUIRE_ADMIN_API_KEY is set but" in refusal()
    assert [key.key for key in parse_flags(["--admin-api-key", "given"]).admin_keys] == ["given"]


def warnings(*argv: str) -> list[str]:
    return [line for line in parse_command_line(argv).warnings if "every user" in line]


def test_a_key_on_the_command_line_is_warned_of_once_with_the_ways_out():
    (line,) = warnings("--api-key", "sesame-open", "--api-key", "another")
    assert line.startswith("--api-key on the command line")
    assert "QUIRE_API_KEY" in line
    assert "--api-key @FILE" in line
    assert "sesame" not in line
    (line,) = warnings("--api-key", "a", "--admin-api-key", "b")
    assert "QUIRE_ADMIN_API_KEY" in line


def test_other_ways_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("QUIRE_API_KEY", "sesame-open")
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", "sesame-too")
    file = tmp_path / "keys"
    file.write_text("from-a-file\n")
    file.chmod(0o640)
    assert warnings("--api-key", f"@{file}") == []
    assert [key.key for key in parse_flags(["--api-key", f"@{file}"]).keys] == ["from-a-file"]
    monkeypatch.setenv("QUIRE_API_KEY", f"sesame-open,@{file}")
    settings = parse_flags([])
    assert {key.key for key in settings.keys} == {"sesame-open", "from-a-file"}
    assert [key.key for key in settings.admin_keys] == ["sesame-too"]


def test_a_file_that_everybody_reads_is_named(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("from-a-file\n")
    file.chmod(0o644)
    for flag in ("--api-key", "--admin-api-key"):
        (line,) = warnings(flag, f"@{file}")
        assert line == f"{flag} @{file} can be read by every user of this machine: chmod o-r it"

"""`quire config check`: what a start would refuse is told without a start, all at once, by name."""

from __future__ import annotations

import os
import shlex
import socket
from pathlib import Path

import pytest

from quire_engine.demo import demo_model_path
from quire_server import cli
from quire_server.flags import ENGINE, check_command_line, parse_command_line
from quire_server.settings import SettingsError
from support.documents import section


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_")):
            monkeypatch.delenv(name)


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, list[str]]:
    """The exit code, stdout, and the lines on stderr without the command's name."""
    code = cli.main(["config", "check", *words])
    said = capsys.readouterr()
    return code, said.out, [line.removeprefix("quire config check: ") for line in said.err.splitlines()]


def test_settings_that_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("port: 12\nmax-num-seqs: 4\nuvicorn-log-level: debug\n")
    code, said, problems = check(capsys, str(demo_model_path()), "--config", str(file), "--trust-remote-code")
    assert (code, problems) == (0, [])
    assert said.startswith("note: --trust-remote-code changes nothing here")
    assert said.splitlines()[-1].startswith("no problem was found; ")


def test_a_name_on_a_hub_is_not_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("nothing is to be connected")

    monkeypatch.setattr(socket.socket, "connect", refused)
    code, said, problems = check(capsys, "someone/a-model", "--tokenizer", "someone/another")
    assert (code, problems) == (0, [])
    assert "note: --model someone/a-model is a name on the Hugging Face Hub, which was not asked" in said
    assert "note: --tokenizer someone/another is" in said


def test_every_problem_of_every_source_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("prot: 12\npipeline-parallel-size: 2\n")
    monkeypatch.setenv("QUIRE_PROT", "3")
    monkeypatch.setenv("QUIRE_SET", "block_size=7")
    monkeypatch.setenv("QUIRE_ADMIN_API_KEY", " ")
    words = [
        "--config",
        str(file),
        "--dtype",
        "foo",
        "--device",
        "tpu",
        "--port",
        "x",
        "--nonsense",
        "--middleware",
        "a",
    ]
    code, said, problems = check(capsys, *words)
    assert (code, said) == (2, "")
    expected = [
        "argument --dtype: invalid choice: 'foo'",
        "argument --device: invalid choice: 'tpu'",
        "--middleware",
        "unknown flag --nonsense",
        "QUIRE_ADMIN_API_KEY is set but has no key in it",
        "unknown environment variable QUIRE_PROT; did you mean QUIRE_PORT?",
        f"--config {file}: unknown setting 'prot'; did you mean port?",
        "--port: input should be a valid integer",
        "QUIRE_SET: block_size: block sizes are 16",
    ]
    for text in expected:
        assert len([line for line in problems if line.startswith(text)]) == 1, (text, problems)
    assert len(problems) == len(expected)


def test_every_combination_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--lora-modules", "a=/b", "--replicas", "2", "--engines", "127.0.0.1:9", "--chat-template", "/no/file"]
    code, _, problems = check(capsys, *words, "--api-key", f"@{tmp_path}/keys")
    assert code == 2
    assert len(problems) == 4
    for text in ("--lora-modules needs", "--engines and --replicas", "no chat template at /no/file", "keys"):
        assert any(text in line for line in problems), text


def test_what_a_start_looks_at_is_looked_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.write_text("no certificate")
    code, _, problems = check(
        capsys, "/no/model", "--ssl-certfile", str(certificate), "--otlp-traces-endpoint", "collector"
    )
    assert code == 2
    assert [line.split(":")[0].split()[0] for line in problems] == [
        "--ssl-certfile",
        "--otlp-traces-endpoint",
        "--model",
    ]
    code, _, (problem,) = check(capsys, str(tmp_path))
    assert code == 2
    assert "the file is missing" in problem


def test_a_node_is_checked_by_its_own_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(capsys, "--node", "--listen", "127.0.0.1:9")[0] == 0
    assert check(capsys, "--node")[2] == ["--listen is missing: HOST:PORT on which this node serves fronts"]
    assert check(capsys, "--listen", "127.0.0.1:9")[2][0].startswith("--listen is of `quire engine`")


def test_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["config"], ["config", "show"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2
        assert capsys.readouterr().err.startswith("quire config: ")


def test_the_example_of_the_documents(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    block = section("docs/install.md", "Check the settings").split("```console\n$ ")[1].split("```")[0]
    command, *expected = block.splitlines()
    variable, program, *words = shlex.split(command)
    monkeypatch.setenv(*variable.split("="))
    assert (program, words[:2]) == ("quire", ["config", "check"])
    assert cli.main(words) == 2
    assert capsys.readouterr().err.splitlines() == expected


CASES = [
    "",
    "/m /n",
    "/m --model /n",
    "--port x",
    "--dtype",
    "--dtype foo bar",
    "--default-chat-template-kwargs.a=1 --default-chat-template-kwargs.a.b=1",
    "-tp 65 -pp 2",
    "--max-num-seqs 0 --port 5",
    "--config /no/file",
    "--api-key a --engine-tls-ca /k",
]


@pytest.mark.parametrize("words", CASES)
@pytest.mark.parametrize("prog", ["quire serve", ENGINE])
def test_it_finds_what_a_start_finds(words: str, prog: str) -> None:
    """At least: the first problem of a start is among those that are told, and a start that works has none."""
    given, problems = check_command_line(words.split(), prog)
    found: tuple[str, ...] = ()
    started = None
    try:
        started = parse_command_line(words.split(), prog)
    except SettingsError as error:
        found = error.lines
    assert given == started
    assert bool(problems) == bool(found)
    assert {*found} <= {*problems}

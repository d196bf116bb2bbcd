"""The command line from outside: exit codes, one clear line, no traceback, no slow imports."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire_server import cli
from quire_server.commands import COMMANDS


def quire(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "quire_server.cli", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        env=path | env,
        check=False,
    )


def assert_clean(result: subprocess.CompletedProcess[str], code: int) -> str:
    """One or a few readable lines on stderr and the right exit code."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert 0 < len(result.stderr.splitlines()) < 10
    return result.stderr


def test_help_and_version(capsys: pytest.CaptureFixture[str]):
    assert cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert cli.main(["version"]) == cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("quire 0.")


def test_unknown_commands(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["server"]) == 2
    assert "did you mean `quire serve`?" in capsys.readouterr().err
    assert cli.main(["frobnicate"]) == 2
    assert "quire --help" in capsys.readouterr().err


def parsers(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    """The parser and those of its sub-commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_text_is_formatted(name: str, capfd: pytest.CaptureFixture[str]):
    """A bare percent sign in a help text ends the process only when the text is printed."""
    module = import_module(COMMANDS[name][0])
    for parser in parsers(module.build_parser()) if hasattr(module, "build_parser") else ():
        assert parser.format_help().startswith("usage: ")
    printed = []
    for words in ([name, "--help"], ["help", name]):
        with contextlib.suppress(SystemExit):  # as argparse leaves, with 0 after a help
            assert cli.main(words) == 0
        printed.append(capfd.readouterr().out)
    assert printed[0] == printed[1] != ""


@pytest.mark.parametrize("during", ["import", "run"])
def test_a_ctrl_c_is_one_line(during: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    found = interrupted if during == "import" else lambda _: SimpleNamespace(run=interrupted)
    monkeypatch.setattr(cli, "import_module", found)
    assert cli.main(["plan", "--kv"]) == 130
    assert capsys.readouterr() == ("", "quire plan: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_the_command_is_imported_is_one_line(number: signal.Signals):
    code = (
        "import os, signal; from quire_server import cli\n"
        f"cli.import_module = lambda name: os.kill(os.getpid(), signal.{number.name})\n"
        "cli.program()"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code, "serve"], capture_output=True, text=True, timeout=60, check=False
    )
    assert assert_clean(result, 128 + number) == f"quire: ended by {number.name}\n"


def test_a_background_job_ignores_a_ctrl_c_until_its_command_decides():
    code = (
        "import os, signal; from quire_server import cli\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "def imported(name): os.kill(os.getpid(), signal.SIGINT); raise SystemExit(7)\n"
        "cli.import_module = imported; cli.program()"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code, "serve"], timeout=60, check=False).returncode == 7


def test_every_command_has_its_module():
    named = {module for module, _ in COMMANDS.values()}
    for module in named:
        assert callable(import_module(module).run)
    for package in ("quire_server", "quire_lab"):
        folder = Path(str(import_module(f"{package}.commands").__file__)).parent
        for path in folder.glob("*.py"):
            assert path.stem == "__init__" or f"{package}.commands.{path.stem}" in named


def take_away(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if not (Path(each) / package).exists()])


@pytest.mark.parametrize(("name", "package"), [("simulate", "quire_lab"), ("bench", "quire_bench")])
def test_a_package_that_is_not_installed_is_one_line(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    take_away(package, monkeypatch)
    assert cli.main([name, "--help"]) == 1
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith(f"quire {name}: the package {package} is not installed: install Quire again")
    assert cli.main(["version"]) == 0


def test_what_is_not_installed_is_not_completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for expected in (True, False):
        assert cli.main(["completion", "bash"]) == 0
        script = capsys.readouterr().out
        assert ("_quire_simulate_" in script, "_quire_serve_" in script) == (expected, True)
        take_away("quire_lab", monkeypatch)


def test_bad_usage():
    assert "did you mean --max-num-seqs?" in assert_clean(quire("serve", "--max-num-seq", "3"), 2)
    assert "did you mean QUIRE_PORT?" in assert_clean(quire("serve", QUIRE_PROT="3"), 2)


@pytest.mark.matrix  # tests/model/test_dry_run.py
def test_a_model_that_is_not_there(tmp_path: Path):
    assert "the file is missing" in assert_clean(quire("serve", "--port", "0", str(tmp_path)), 1)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    assert "HF_HUB_OFFLINE" in assert_clean(quire("serve", "--port", "0", "someone/a-model", **offline), 1)
    assert "such as Qwen/Qwen3-0.6B" in assert_clean(quire("serve", "--port", "0", "nowhere", **offline), 1)
    assert "GGUF" in assert_clean(quire("serve", "--port", "0", "a/model.gguf"), 1)


def test_an_address_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "--port" in assert_clean(quire("serve", "--port", str(port)), 2)


@pytest.mark.matrix  # tests/model/test_dry_run.py
def test_dry_run_prints_the_plan():
    result = quire("serve", "--dry-run", "--kv-memory", "32MiB", "--max-num-seqs", "4")
    assert result.returncode == 0, result.stderr
    for word in ("KV cache", "32.0 MiB", "weights", "blocks"):
        assert word in result.stdout


def test_the_command_line_is_parsed_before_anything_heavy_is_imported():
    code = (
        "import sys; from quire_server import cli; cli.main(['serve', '--port', 'x']);"
        "heavy = ('torch', 'fastapi', 'uvicorn', 'tokenizers', 'huggingface_hub');"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("argv", "most", "absent"),
    [
        (["--help"], 150, {"pydantic", "yaml", "asyncio", "msgspec"}),
        (
            ["serve", "--help"],
            450,
            {"fastapi", "uvicorn", "msgspec", "prometheus_client", "jinja2", "tokenizers"},
        ),
    ],
)
def test_help_imports_little(argv: list[str], most: int, absent: set[str]):
    """Modules are counted, since seconds depend on the machine."""
    code = (
        "import sys\nfrom quire_server import cli\n"
        f"try: cli.main({argv!r})\nexcept SystemExit: pass\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = result.stderr.split()
    assert absent & set(loaded) == set()
    assert len(loaded) <= most

"""`quire completion`: the shells themselves complete commands, flags and values, and each setting is there."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire_kernels.cpu import build
from quire_server import cli
from quire_server.commands import build_kernels
from quire_server.commands.completion import commands
from quire_server.commands.showing.completions import SHELLS, Command, Flag
from quire_server.settings import Settings, flag_name

SCRIPTS = {name: write(commands()) for name, write in SHELLS.items()}


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed here")


def of(name: str) -> Command:
    return next(each for each in commands() if each.name == name)


def names(command: str) -> set[str]:
    return {name for flag in of(command).flags for name in flag.names}


def test_every_command_and_every_setting_is_there() -> None:
    assert [each.name for each in commands()] == list(cli.COMMANDS)
    flags = {flag_name(name) for name in Settings.model_fields}
    assert len(flags) > 100
    assert flags <= names("serve")
    assert flags <= names("run-batch") | {"--input-file", "--output-file"}
    assert "--no-packed-cache" in names("serve")
    assert "--host" not in names("engine")
    assert not [each.name for each in commands() if not each.flags and each.name != "version"]


def test_values_are_the_settings_own() -> None:
    flags = {name: flag for flag in of("serve").flags for name in flag.names}
    assert flags["--dtype"].values == ("auto", "bfloat16", "float16", "float32")
    assert flags["--config"].is_file
    assert flags["--port"] == Flag(
        names=("--port",), help=flags["--port"].help, takes_value=True, values=(), is_file=False
    )
    assert not flags["--packed-cache"].takes_value


def test_the_flags_of_the_kernels_are_the_other_process_s() -> None:
    def shown(parser: argparse.ArgumentParser) -> set[str]:
        return {name for action in parser._actions for name in action.option_strings}

    assert shown(build_kernels.build_parser()) == shown(build.build_parser())


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == SCRIPTS["fish"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["completion", "tcsh"])
    assert caught.value.code == 2
    assert "choose from 'bash', 'zsh', 'fish'" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_no_help_text_can_run(shell: str, tmp_path: Path) -> None:
    """A text with all that a shell might take for more than a text."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    evil = f"it's `touch {tmp_path}/a` $(touch {tmp_path}/b); \"touch\" [x]:y {{z}} \\ ' (w) *"
    flag = Flag(names=("--x",), help=evil, takes_value=True, values=(), is_file=False)
    script = SHELLS[shell]([Command(name="serve", help=evil, flags=(flag,), words=())])
    file = tmp_path / "script"
    file.write_text(script)
    defined = "compdef() { :; }; " if shell == "zsh" else ""
    words = [shell, "-f", "-c"] if shell == "zsh" else [shell, "-c"]
    done = subprocess.run([*words, f"{defined}source {file}"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["script"]


LINES = [
    ("ser", {"serve"}),
    ("serve --tensor-p", {"--tensor-parallel-size"}),
    ("serve --no-packed", {"--no-packed-cache"}),
    ("serve --dtype bf", {"bfloat16"}),
    ("serve --dtype=fl", {"float16", "float32"}),
    ("serve --port ", set()),
    ("completion f", {"fish"}),
    ("config ch", {"check"}),
    ("config fr", {"from"}),
    ("config check --max-num-se", {"--max-num-seqs"}),
    ("engine --liste", {"--listen"}),
    ("bench --concurr", {"--concurrency"}),
    ("serve --config a_f", {"a_file.yaml"}),
    ("serve a_f", {"a_file.yaml"}),
]
each_line = pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])


@needs("bash")
@each_line
def test_in_bash(line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "a_file.yaml").touch()
    (tmp_path / "script").write_text(SCRIPTS["bash"])
    words = ["quire", *(part for part in re.split(r" |(=)", line) if part is not None)]  # as readline splits them
    quoted = " ".join(f'"{word}"' for word in words)
    shown = "printf '%s\\n' \"${COMPREPLY[@]}\""
    run = f"source ./script; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _quire; {shown}"
    done = subprocess.run(["bash", "-c", run], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected


@needs("fish")
@each_line
def test_in_fish(line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "a_file.yaml").touch()
    (tmp_path / "script").write_text(SCRIPTS["fish"])
    run = f"source ./script; complete -C 'quire {line}'"
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path),
    }
    done = subprocess.run(
        *(["fish", "--no-config", "-c", run],),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = {each.split("\t")[0].removeprefix("--dtype=") for each in done.stdout.splitlines()}
    assert found == expected


ZSH = """
PROMPT='%% '; autoload -U compinit; compinit -D -u; setopt nolistbeep noautomenu; unsetopt zle_bracketed_paste
zstyle ':completion:*' list-prompt ''; source ./script; bindkey -e; bindkey '^X' list-choices; print REA""DY
"""


@needs("zsh")
def test_in_zsh(tmp_path: Path) -> None:
    """At a terminal, as zsh completes nowhere else: one shell for all lines."""
    (tmp_path / "a_file.yaml").touch()
    (tmp_path / "script").write_text(SCRIPTS["zsh"])
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-f", "-i"], {"PATH": os.environ["PATH"], "TERM": "dumb", "COLUMNS": "200"})
    screen = Screen(terminal)
    try:
        screen.send(ZSH.replace("\n", "; ").strip("; ") + "\r")
        screen.wait("READY")
        for line, expected in LINES:
            if len(expected) == 1:
                (whole,) = expected
                start = line.rpartition("=")[2].split(" ")[-1]
                screen.send(f"quire {line}\t")
                screen.wait(f"quire {line}{whole.removeprefix(start)}")
                screen.send("\x15")  # the line away
        screen.send("quire serve --dtype \t")
        screen.wait("bfloat16")
        screen.wait("float32")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


class Screen:
    """A terminal's output, without what moves its cursor."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self._text = terminal, ""

    def send(self, text: str) -> None:
        self._text = ""
        os.write(self._terminal, text.encode())

    def wait(self, text: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self._text:
            assert time.monotonic() < deadline, f"{text!r} is not in {self._text!r}"
            if select.select([self._terminal], [], [], 0.2)[0]:
                read = os.read(self._terminal, 65536).decode(errors="replace")
                self._text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|[\x07\r]", "", read)


def test_it_does_not_import_what_computes() -> None:
    code = "import sys; from quire_server import cli; cli.main(['completion', 'bash']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.endswith("\nFalse\n")

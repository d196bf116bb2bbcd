"""`quire completion`: every command and setting is in the scripts, and bash completes commands, flags and values."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import shtab

from quire_kernels.cpu import build
from quire_server import cli
from quire_server.commands import COMMANDS as OF_QUIRE
from quire_server.commands import build_kernels
from quire_server.commands.completion import whole_parser
from quire_server.settings import Settings, flag_name, plain_fields

WHOLE = whole_parser()
(COMMANDS,) = [action.choices for action in WHOLE._actions if isinstance(action.choices, dict)]
SCRIPTS = {shell: shtab.complete(WHOLE, shell) for shell in ("bash", "zsh", "fish")}


def names(command: str) -> set[str]:
    return {name for action in COMMANDS[command]._actions for name in action.option_strings}


def test_every_command_and_every_setting_is_there() -> None:
    assert list(COMMANDS) == list(OF_QUIRE)
    flags = {flag_name(name) for name in plain_fields(Settings)}
    assert flags <= names("serve")
    assert flags <= names("run-batch")
    assert {"--input-file", "-o"} <= names("run-batch")
    assert "--no-deterministic" in names("serve")
    assert not [name for name in COMMANDS if not names(name) and name != "version"]
    for script in SCRIPTS.values():
        assert "prefill-chunk" in script
        assert "pipeline-parallel-size" not in script, "of vLLM, and in no help"


def test_the_flags_of_the_kernels_are_the_other_process_s() -> None:
    def shown(parser: argparse.ArgumentParser) -> set[str]:
        return {name for action in parser._actions for name in action.option_strings}

    assert shown(build_kernels.build_parser()) == shown(build.build_parser())


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == SCRIPTS["fish"] + "\n"
    with pytest.raises(SystemExit) as caught:
        cli.main(["completion", "ksh"])
    assert caught.value.code == 2
    assert "choose from 'bash', 'zsh', 'fish'" in capsys.readouterr().err


LINES = [
    ("ser", {"serve"}),
    ("serve --tensor-p", {"--tensor-parallel-size"}),
    ("serve --no-determ", {"--no-deterministic"}),
    ("serve --dtype bf", {"bfloat16"}),
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


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_in_bash(line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "a_file.yaml").touch()
    (tmp_path / "script").write_text(SCRIPTS["bash"])
    words = ["quire", *line.split(" ")]
    quoted = shlex.join(words)
    shown = "printf '%s\\n' \"${COMPREPLY[@]}\""
    run = f"source ./script; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_quire; {shown}"
    done = subprocess.run(["bash", "-c", run], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected


def test_it_does_not_import_what_computes() -> None:
    code = "import sys; from quire_server import cli; cli.main(['completion', 'bash']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.endswith("\nFalse\n")

"""Which files our processes may import."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from quire_engine.own_modules import (
    WritableSearchPath,
    check_search_path,
    leave_out_working_directory,
    module_command,
)

ROOT = Path(__file__).parents[3]


def test_a_file_of_the_working_directory_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("print('planted')")
    asked = subprocess.run(
        module_command("json.tool", "--help"), cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "planted" not in asked.stdout


def test_every_process_of_ours_is_started_so() -> None:
    sources = [
        path
        for folder in ("engine", "server", "kernels", "benchmarks", "lab")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(sources) > 300
    unsafe = re.compile(r"sys\.executable,\s*+(?!\"-[PI]\")")
    assert [path.name for path in sources if unsafe.search(path.read_text("utf-8"))] == []


@pytest.mark.parametrize("entry", ["", ".", "lib/python"])
def test_an_entry_that_follows_the_working_directory_is_refused(entry: str) -> None:
    with pytest.raises(WritableSearchPath, match="follows the working directory"):
        check_search_path(["/usr/lib", entry])


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "shared" / "lib"
    folder.mkdir(parents=True)
    check_search_path([str(folder), str(tmp_path / "missing")])
    for writable, mode in ((folder, 0o777), (folder, 0o1777), (folder.parent, 0o757)):
        writable.chmod(mode)
        with pytest.raises(WritableSearchPath, match=f"chmod o-w {writable}"):
            check_search_path([str(folder)])
        writable.chmod(0o755)


def test_so_is_a_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "lib").symlink_to(tmp_path / "shared")
    with pytest.raises(WritableSearchPath, match="every user"):
        check_search_path([str(tmp_path / "lib")])


def test_a_sticky_folder_on_the_way_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "tmp" / "lib"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o1777)
    check_search_path([str(folder)])


@pytest.mark.parametrize(
    ("given", "left"), [("/a:", "/a"), (":/a", "/a"), ("/a::/b", "/a:/b"), ("/a", None), ("", None), (None, None)]
)
def test_an_empty_entry_of_the_variable_is_left_out(given: str | None, left: str | None) -> None:
    environment = {} if given is None else {"PYTHONPATH": given}
    path = ["/a", os.getcwd(), "/b"]
    assert leave_out_working_directory(path, environment) == (left is not None)
    assert environment.get("PYTHONPATH") == (left or given)
    assert path == (["/a", "/b"] if left else ["/a", os.getcwd(), "/b"])


def test_an_entry_that_names_the_working_directory_stays() -> None:
    environment, path = {"PYTHONPATH": f":{os.getcwd()}"}, [os.getcwd(), "/b"]
    assert leave_out_working_directory(path, environment)
    assert path == [os.getcwd(), "/b"]


def test_a_command_says_that_it_leaves_the_working_directory_out(tmp_path: Path) -> None:
    (tmp_path / "socket.py").write_text("raise SystemExit('planted')")
    done = subprocess.run(
        module_command("quire_server.cli", "plan", "--kv"),
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT / 'server'}:{ROOT / 'engine'}:{ROOT / 'kernels'}:", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.stderr.splitlines()[0] == "quire: PYTHONPATH has an empty entry, the working directory, which is left out"
    )
    assert "planted" not in done.stderr


def test_a_command_refuses_in_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    done = subprocess.run(
        module_command("quire_server.cli", "version"),
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'server'}:{ROOT / 'engine'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"quire: {tmp_path} can be written to by every user, and Python imports modules from {tmp_path};"
        f" chmod o-w {tmp_path}, or take it out of PYTHONPATH"
    ]

"""Folders whose files may be loaded: what others could have changed is refused, with the name and the fix."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quire_kernels import trusted_folder
from quire_kernels.trusted_folder import UntrustedFolder, open_trusted, trusted

SOMEBODY = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def refused(path: Path, match: str) -> str:
    with pytest.raises(UntrustedFolder, match=match) as error:
        trusted(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value) or str(path.parent) in str(error.value)
    return str(error.value)


def contents(path: Path) -> bytes:
    with open(open_trusted(path), "rb") as file:
        return file.read()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_folder_is_made_for_us_alone(tmp_path: Path):
    before = open_descriptors()
    folder = trusted(tmp_path / "a" / "b")
    assert folder == tmp_path / "a" / "b"
    assert [each.stat().st_mode & 0o777 for each in (folder, folder.parent)] == [0o700, 0o700]
    assert trusted(folder) == folder
    assert open_descriptors() == before


def test_the_text_of_a_path_is_made_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert trusted(Path("x/../y/./z")) == tmp_path / "y" / "z"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to(tmp_path: Path, mode: int):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    assert "chmod go-w" in refused(tmp_path / "cache", "can be written to by others")


def test_a_folder_that_others_may_read_is_good(tmp_path: Path):
    (tmp_path / "cache").mkdir(mode=0o755)
    (tmp_path / "cache").chmod(0o755)
    assert trusted(tmp_path / "cache") == tmp_path / "cache"


def test_a_parent_that_others_may_write_to(tmp_path: Path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    refused(tmp_path / "shared" / "cache", "can be written to by others")
    (tmp_path / "shared").chmod(0o1777)  # as /tmp is: what is ours stays where it is
    assert trusted(tmp_path / "shared" / "cache")


@AS_ROOT
@pytest.mark.parametrize("sticky", [False, True])
def test_a_folder_of_somebody_else(tmp_path: Path, sticky: bool):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777 if sticky else 0o755)
    (tmp_path / "shared" / "cache").mkdir()
    os.chown(tmp_path / "shared" / "cache", SOMEBODY, -1)
    refused(tmp_path / "shared" / "cache", f"belongs to another user \\({SOMEBODY}\\)")
    refused(tmp_path / "shared" / "cache" / "ours", "belongs to another user")


@AS_ROOT
def test_a_folder_of_roots_is_a_good_parent_but_nobody_elses_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(trusted_folder.os, "geteuid", lambda: SOMEBODY)
    refused(tmp_path / "cache", "cache belongs to another user \\(0\\)")
    os.chown(tmp_path / "cache", SOMEBODY, -1)
    assert trusted(tmp_path / "cache") == tmp_path / "cache"


def test_links_are_refused(tmp_path: Path):
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refused(tmp_path / "link", "is a link; put a folder of your own in its place")
    refused(tmp_path / "link" / "inner", "is a link")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "dangling" / "x", "is a link")
    assert not (tmp_path / "nowhere").exists()


def test_what_cannot_be_made_or_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "Not a directory")
    refused(tmp_path / "file" / "inner", "Not a directory")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trusted_folder.os, "mkdir", full)
    refused(tmp_path / "new", "cannot be made: No space left on device")


def test_a_folder_that_is_swapped_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Somebody is faster: the check is of what was opened, not of what was asked for."""
    (tmp_path / "elsewhere").mkdir()
    real = os.mkdir

    def overtaken(name: str, mode: int, *, dir_fd: int) -> None:
        os.symlink(tmp_path / "elsewhere", name, dir_fd=dir_fd)
        real(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(trusted_folder.os, "mkdir", overtaken)
    refused(tmp_path / "cache", "is a link")


def test_a_file_of_ours_is_read(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"ours")
    (tmp_path / "file").chmod(0o644)
    assert contents(tmp_path / "file") == b"ours"
    for missing in (tmp_path / "none", tmp_path / "nowhere" / "none"):
        with pytest.raises(FileNotFoundError) as error:
            open_trusted(missing)
        assert not isinstance(error.value, UntrustedFolder)


def link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


def hard_link(path: Path) -> None:
    os.link(path, path.with_name("other"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def given_away(path: Path) -> None:
    os.chown(path, SOMEBODY, -1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (link, "is a link; remove it"),
        (hard_link, "has another name as well"),
        (pipe, "is not a plain file"),
        (folder, "is not a plain file"),
        (lambda path: path.chmod(0o664), "can be written to by others"),
        (lambda path: path.chmod(0o646), "can be written to by others"),
        pytest.param(given_away, "belongs to another user", marks=AS_ROOT),
        (lambda path: path.parent.chmod(0o775), "can be written to by others; chmod go-w"),
    ],
)
def test_a_file_that_others_may_have_written(tmp_path: Path, change: Callable[[Path], None], match: str):
    (tmp_path / "cache").mkdir()
    file = tmp_path / "cache" / "file"
    file.write_bytes(b"theirs")
    change(file)
    before = open_descriptors()
    with pytest.raises(UntrustedFolder, match=match):
        open_trusted(file)
    assert open_descriptors() == before

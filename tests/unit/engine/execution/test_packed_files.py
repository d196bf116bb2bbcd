"""Files of packed weights: written behind who packs, whole or not at all; read only where nothing is wrong."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_engine.execution.packed import folder as folder_module
from quire_engine.execution.packed.folder import FileWriter, PackedFolder, Refused, open_folder, read_image
from quire_engine.execution.packed.image import HEADER_BYTES, ImageWriter, new_memory, open_image
from quire_engine.execution.progress import tell_nobody

BYTES = 20 << 20
CONTENT = bytes(range(256)) * (BYTES // 256)
FOREIGN = 12345


def checksum(address: int, count: int) -> int:
    return zlib.crc32((ctypes.c_char * count).from_address(address))


@pytest.fixture
def fd() -> Iterator[int]:
    handle = new_memory()
    yield handle
    os.close(handle)


@pytest.fixture
def folder(tmp_path: Path) -> PackedFolder:
    found = open_folder(str(tmp_path / "packed"), 1 << 30)
    assert found is not None
    return found


def pack(fd: int, key: str = "key", writer: FileWriter | None = None) -> None:
    image = ImageWriter(fd, key, BYTES, writer.advance if writer else lambda _: None)
    part = image.allocate(BYTES)
    (ctypes.c_char * BYTES).from_address(part.data_ptr()).raw = CONTENT
    image.put_matrix("all", {}, {"packed": part})
    image.tell_used()
    header = image.seal(checksum, 2)
    if writer is not None:
        writer.finish(header.num_bytes)


def kept(folder: PackedFolder, key: str = "key") -> Path:
    """The file of an image that was packed and written."""
    fd = new_memory()
    writer = FileWriter(folder, key, fd, BYTES)
    pack(fd, key, writer)
    os.close(fd)
    path = writer.wait()
    assert path == folder.file(key)
    return path


def read(path: Path, fd: int, key: str = "key") -> bytes:
    read_image(path, key, fd, checksum=checksum, threads=2, tell=tell_nobody)
    image = open_image(fd, key)
    assert image is not None
    _, parts = image.matrix("all")
    return ctypes.string_at(parts["packed"].data_ptr(), BYTES)


def test_what_was_packed_is_read(folder, fd, capsys):
    path = kept(folder)
    assert capsys.readouterr().err == f"quire: the packed weights are kept in {path} (22.0 MiB) for the next start\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read(path, fd) == CONTENT
    assert sorted(each.name for each in folder.path.iterdir()) == [path.name, "lock"]


def test_progress_is_told(folder, fd):
    words: list[tuple[str, int, int]] = []
    read_image(kept(folder), "key", fd, checksum=checksum, threads=1, tell=lambda *word: words.append(word))
    total = (22 << 20) - HEADER_BYTES
    assert words[0] == ("reading packed weights", 0, total)
    assert words[-1] == ("reading packed weights", total, total)
    assert len(words) == 4


def test_a_file_that_is_read_counts_as_used(folder, fd):
    path = kept(folder)
    os.utime(path, (0, 0))
    read(path, fd)
    assert path.stat().st_mtime > time.time() - 60


@pytest.mark.parametrize("at", [0, 20, 100, HEADER_BYTES - 9, HEADER_BYTES, HEADER_BYTES + (8 << 20), (22 << 20) - 1])
def test_one_changed_bit_is_refused(folder, fd, at):
    path = kept(folder)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(Refused):
        read(path, fd)
    assert open_image(fd, "key") is None


@pytest.mark.parametrize("size", [0, 100, HEADER_BYTES, (22 << 20) - 1, 20 << 20, 24 << 20])
def test_a_file_of_another_length_is_refused(folder, fd, size):
    path = kept(folder)
    os.truncate(path, size)
    with pytest.raises(Refused):
        read(path, fd)


def test_another_version_is_refused(folder, fd):
    path = kept(folder)
    with path.open("r+b") as file:
        file.write(b"quire packed 000")
    with pytest.raises(Refused, match="another version"):
        read(path, fd)


def test_a_file_of_other_weights_is_refused(folder, fd):
    path = kept(folder, "another")
    with pytest.raises(Refused, match="other weights"):
        read(path, fd)


def test_a_file_that_others_may_change_is_refused(folder, fd):
    path = kept(folder)
    path.chmod(0o666)
    with pytest.raises(Refused, match="written to by others"):
        read(path, fd)
    path.chmod(0o600)
    os.link(path, folder.path / "another name")
    with pytest.raises(Refused, match="another name"):
        read(path, fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(folder, fd):
    path = kept(folder)
    os.chown(path, FOREIGN, FOREIGN)
    with pytest.raises(Refused, match="another user"):
        read(path, fd)


def test_a_link_is_refused(folder, fd, tmp_path):
    path = kept(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="link"):
        read(path, fd)


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, capsys):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert open_folder(str(shared), 1) is None
    line = capsys.readouterr().err
    assert line.startswith("quire: packed weights are not kept for the next start: ")
    assert str(shared) in line
    assert line.count("\n") == 1


def test_of_two_that_write_at_once_one_does(folder, capsys):
    fds = [new_memory(), new_memory()]
    writers = [FileWriter(folder, "key", fd, BYTES) for fd in fds]
    for fd, writer in zip(fds, writers, strict=True):
        pack(fd, writer=writer)
    assert [writer.wait() for writer in writers] == [folder.file("key")] * 2
    assert capsys.readouterr().err.count("are kept in") == 1
    for fd in fds:
        os.close(fd)


def test_a_full_disk_costs_a_line(folder, fd, monkeypatch, capsys):
    def full(out: int, memory: int, offset: int, count: int) -> int:
        if offset > HEADER_BYTES + (8 << 20):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sent(out, memory, offset, count)

    sent = os.sendfile
    monkeypatch.setattr(folder_module.os, "sendfile", full)
    writer = FileWriter(folder, "key", fd, BYTES)
    pack(fd, writer=writer)
    assert writer.wait() is None
    line = capsys.readouterr().err
    assert "No space left on device; the next start packs them again" in line
    assert line.count("\n") == 1
    assert [each.name for each in folder.path.iterdir()] == ["lock"]
    assert open_image(fd, "key") is not None, "it serves on"


def test_what_is_not_packed_to_its_end_leaves_no_file(folder, fd):
    writer = FileWriter(folder, "key", fd, BYTES)
    writer.advance(HEADER_BYTES)
    writer.stop()
    assert [each.name for each in folder.path.iterdir()] == ["lock"]


KILLED = """
import sys, time
from quire_engine.execution.packed.folder import FileWriter, PackedFolder
from quire_engine.execution.packed.image import ImageWriter, new_memory
from pathlib import Path
fd = new_memory()
writer = FileWriter(PackedFolder(Path(sys.argv[1]), 1 << 30), "key", fd, 20 << 20)
image = ImageWriter(fd, "key", 20 << 20, writer.advance)
image.allocate(16 << 20)[:] = 1
image.tell_used()
while not any(each.stat().st_size > 10 << 20 for each in Path(sys.argv[1]).glob(".writing-*")):
    time.sleep(0.01)
print("half", flush=True)
time.sleep(60)
"""


def test_a_kill_in_the_middle_leaves_no_file_that_is_used(folder, fd):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder.path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        child.send_signal(signal.SIGKILL)
    assert len(list(folder.path.glob(".writing-*"))) == 1
    assert not folder.file("key").exists()
    assert read(kept(folder), fd) == CONTENT
    assert not list(folder.path.glob(".writing-*")), "the next one removes it"


def test_the_longest_unused_go_first(tmp_path, capsys):
    folder = PackedFolder(kept_in(tmp_path), 60 << 20)
    first, second = kept(folder, "first"), kept(folder, "second")
    os.utime(first, (2, 2))
    os.utime(second, (1, 1))
    third = kept(folder, "third")
    assert [first.exists(), second.exists(), third.exists()] == [True, False, True]
    assert f"removed {second}, the longest unused" in capsys.readouterr().err


def kept_in(tmp_path: Path) -> Path:
    found = open_folder(str(tmp_path / "packed"), 1)
    assert found is not None
    return found.path


def test_what_is_larger_than_all_may_be_is_not_kept(tmp_path, fd, capsys):
    folder = PackedFolder(kept_in(tmp_path), 10 << 20)
    writer = FileWriter(folder, "key", fd, BYTES)
    pack(fd, writer=writer)
    assert writer.wait() is None
    assert "they take 20.0 MiB, --packed-cache allows 10.0 MiB" in capsys.readouterr().err


def test_a_disk_without_room_costs_no_other_file(tmp_path, fd, monkeypatch, capsys):
    folder = PackedFolder(kept_in(tmp_path), 1 << 40)
    other = kept(folder, "other")
    monkeypatch.setattr(folder_module, "_SPARE_SHARE", 1.0)
    writer = FileWriter(folder, "key", fd, 1 << 30)
    pack(fd, writer=writer)
    assert writer.wait() is None
    assert other.exists()
    assert "the disk has 0 B to spare" in capsys.readouterr().err

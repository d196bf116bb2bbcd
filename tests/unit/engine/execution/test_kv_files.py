"""KV blocks in files: whole, of this layout, no more than there are host blocks, in a directory that can be trusted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch

from quire_engine.contract.errors import ConfigError
from quire_engine.execution.kv.kv_storage import KVFiles

BYTES = 40
KEYS = [bytes([number]) * 32 for number in range(9)]


class Host:
    """Three host blocks and their files."""

    def __init__(self, directory: Path, layout: bytes = b"layout") -> None:
        self.rows = torch.zeros(3, BYTES, dtype=torch.uint8)
        self.files = KVFiles(directory, layout, num_bytes=BYTES, row=self.rows.__getitem__)
        self.keys = self.files.load(3)

    def store(self, block: int, number: int, wait: Callable[[], None] = lambda: None) -> None:
        """A block gets a content of its own, by the key of its number."""
        self.files.replace([block], [KEYS[number]])
        self.rows[block].fill_(number)
        self.files.write([block], [KEYS[number]], wait)

    def found(self) -> dict[bytes, int]:
        return {key: int(self.rows[block][0]) for block, key in enumerate(self.keys)}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Servers one after the other, each with the directory to itself."""
    opened: list[Host] = []

    def start(layout: bytes = b"layout") -> Host:
        if opened:
            opened.pop().files.close()
        opened.append(Host(tmp_path / "kv", layout))
        return opened[-1]

    yield start
    opened.pop().files.close()


def files_of(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kv").glob("*/*.kv"))


def test_what_was_stored_is_there_at_the_next_start(host):
    first = host()
    assert first.keys == ()
    first.store(0, 4)
    first.store(2, 5)
    assert host().found() == {KEYS[4]: 4, KEYS[5]: 5}


def test_what_was_replaced_is_not(host, tmp_path):
    first = host()
    for number in range(7):
        first.store(number % 3, number)
    first.files.replace([1], [b""])  # a block that is of use to nobody else
    assert host().found() == {KEYS[5]: 5, KEYS[6]: 6}
    assert len(files_of(tmp_path)) == 2


def test_a_content_that_has_moved_keeps_its_file(host):
    first = host()
    first.store(0, 4)
    first.files.replace([1, 0], [KEYS[4], KEYS[5]])  # as a plan may list it: here before it is gone there
    first.rows[0].fill_(5)
    first.rows[1].fill_(4)
    first.files.write([1, 0], [KEYS[4], KEYS[5]], lambda: None)
    assert host().found() == {KEYS[4]: 4, KEYS[5]: 5}


def test_a_block_is_read_when_its_content_has_arrived_and_not_if_another_is_to_come(host):
    first, arrived = host(), Event()
    first.store(0, 4, arrived.wait)
    first.store(1, 5)
    first.store(1, 6)  # the first one's write waits behind the one that waits for the device
    first.rows[0].fill_(44)
    arrived.set()
    assert host().found() == {KEYS[4]: 44, KEYS[6]: 6}


def test_more_than_the_disk_takes_is_left_out(host, monkeypatch):
    monkeypatch.setattr("quire_engine.execution.kv.kv_storage._MOST_WAITING", 1)
    first, arrived, begun = host(), Event(), Event()
    first.store(0, 4, lambda: (begun.set(), arrived.wait()))
    assert begun.wait(300)
    first.store(1, 5)
    first.store(2, 6)
    arrived.set()
    assert host().found() == {KEYS[4]: 4, KEYS[5]: 5}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        lambda path: path.write_bytes(b""),
        lambda path: path.rename(path.with_name(f"{KEYS[7].hex()}.kv")),
        lambda path: (path.rename(path.with_suffix(".real")), path.symlink_to(path.with_suffix(".real"))),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["short", "changed", "empty", "of another content", "a link", "a directory"],
)
def test_a_file_that_is_not_as_it_was_written_is_not_read(host, tmp_path, damage, caplog):
    first = host()
    first.store(0, 4)
    first.store(1, 5)
    first.files.close()
    first.files.close = lambda: None
    damage(files_of(tmp_path)[0])
    assert host().found() == {KEYS[5]: 5}
    assert [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]


def test_other_layouts_do_not_meet(host):
    host(b"one").store(0, 4)
    assert host(b"another").keys == ()
    assert host(b"one").found() == {KEYS[4]: 4}


def test_the_newest_come_in_where_there_is_no_room_for_all(host, tmp_path):
    first = host()
    first.store(0, 4)
    first.files.close()
    first.files.close = lambda: None
    (path,) = files_of(tmp_path)
    for age, number in enumerate((6, 7, 8)):  # foreign, but named as ours: to be counted
        other = path.with_name(f"{KEYS[number].hex()}.kv")
        other.write_bytes(path.read_bytes())
        os.utime(other, (age, age))
    assert host().found() == {KEYS[4]: 4}
    assert len(files_of(tmp_path)) == 1


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, mode):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(ConfigError, match="must be a directory of the server's own user that nobody else may write to"):
        Host(tmp_path / "kv")


def test_a_link_and_a_file_are_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match="kv_offload_dir"):
            Host(tmp_path / name)


def test_two_servers_do_not_share_a_directory(host, tmp_path, monkeypatch):
    monkeypatch.setattr("quire_engine.execution.kv.block_files._PATIENCE", 0.1)
    host()
    with pytest.raises(ConfigError, match="in use by another server"):
        Host(tmp_path / "kv")


def test_a_disk_that_fails_ends_the_writing_and_nothing_else(host, monkeypatch, caplog):
    def full(*_):
        raise OSError("no space left on device")

    first = host()
    monkeypatch.setattr("os.replace", full)
    first.store(0, 4)
    first.store(1, 5)
    first.files.close()
    first.files.close = lambda: None
    monkeypatch.undo()
    assert host().keys == ()
    assert "written no more: no space left on device" in caplog.text


def test_what_is_forgotten_leaves_the_disk_at_once_and_for_good(host, tmp_path):
    first = host()
    for number in range(3):
        first.store(number, number)
    late = Event()
    first.store(1, 5, late.wait)  # still on its way when it is forgotten
    first.files.forget([0, 1])
    late.set()
    second = host()
    assert second.found() == {KEYS[2]: 2}
    assert len(files_of(tmp_path)) == 1

"""Prefix blocks in files: written behind the steps, bounded by age of use, refused where they are not as written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch

from quire_engine.contract.errors import ConfigError
from quire_engine.execution.kv.block_files import BlockFiles
from quire_engine.execution.kv.pool_rows import PoolRows
from quire_engine.execution.kv.prefix_files import PrefixFiles, open_prefix_files

BYTES = 40
KEYS = [bytes([number]) * 32 for number in range(9)]
POOL = (8, 2, BYTES // 8)  # blocks of float32


class Kept:
    """A pool whose blocks hold the numbers of their keys, and its files."""

    def __init__(self, directory: Path, layout: bytes, most: int, places: int) -> None:
        self.pool = torch.zeros(POOL)
        self.files: PrefixFiles = open_prefix_files(directory, layout, PoolRows(self.pool), most, places=places)

    def keep(self, *numbers: int) -> None:
        """Blocks of the pool get the contents of these numbers, which follow each other in a prompt."""
        self.files.use([KEYS[number] for number in numbers])
        for depth, number in enumerate(numbers):
            self.pool[number % 8].fill_(number)
            self.files.offer(KEYS[number], number % 8, depth)

    def written(self, count: int) -> None:
        """Wait until so many blocks have been written or dropped."""
        until(lambda: self.files.counts.written + self.files.counts.dropped >= count)

    def read(self, *numbers: int) -> list[int | None]:
        """What the files have for these numbers, by way of the pool."""
        self.files.read([KEYS[number] for number in numbers])
        found: list[int | None] = []
        while len(found) < len(numbers):
            self.files.wait(300)
            for key, payload in self.files.take():
                assert key == KEYS[numbers[len(found)]]
                if payload is not None:
                    self.files.place(payload, 7)
                found.append(None if payload is None else int(self.pool[7, 0, 0]))
        return found


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    """Engines one after the other, each with the directory to itself."""
    opened: list[Kept] = []

    def start(layout: bytes = b"layout", most: int = 100, *, beside: bool = False, places: int = 1) -> Kept:
        if opened and not beside:
            opened.pop().files.close(5)
        opened.append(Kept(tmp_path / "kv", layout, most, places))
        return opened[-1]

    yield start
    for each in opened:
        each.files.close(5)


def files_of(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "kv").glob("*/*.kv"))


def test_what_was_written_is_there_at_the_next_start_for_this_user_alone(run, tmp_path):
    first = run()
    first.keep(1, 2, 3)
    again = run()
    assert [again.files.holds(KEYS[number]) for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert again.files.counts.blocks == 3
    assert again.read(1, 2, 3) == [1, 2, 3]
    assert (again.files.counts.read, again.files.seconds_per_block > 0) == (3, True)
    assert not any(path.stat().st_mode & 0o077 for path in (tmp_path / "kv").rglob("*"))


def test_a_smaller_bound_counts_from_the_start(run, tmp_path):
    run().keep(1, 2, 3)
    again = run(most=2)
    assert [again.files.holds(KEYS[number]) for number in (1, 2, 3)] == [True, True, False]
    until(lambda: len(files_of(tmp_path)) == 2)


def test_a_block_that_the_pool_takes_back_while_it_is_copied_is_not_written(run, monkeypatch):
    first, copying, lost = run(), Event(), Event()

    def slow(row: torch.Tensor) -> bytes:
        copying.set()
        assert lost.wait(300)
        return bytes(row.numel())

    monkeypatch.setattr("quire_engine.execution.kv.pool_rows.bytes_of", slow)
    first.keep(1)
    assert copying.wait(300)
    first.files.lose(KEYS[1])
    first.pool[1].fill_(99)
    lost.set()
    first.written(1)
    monkeypatch.undo()
    assert (first.files.counts.written, first.files.counts.dropped) == (0, 1)
    assert not run().files.holds(KEYS[1])


def test_more_than_may_wait_is_dropped_and_counted(run, monkeypatch):
    monkeypatch.setattr("quire_engine.execution.kv.prefix_files.MOST_WAITING", 2)
    first, goes_on = run(), Event()
    write = BlockFiles.write
    begun = Event()

    def slow(self: BlockFiles, key: bytes, payload: bytes, *, used: int | None = None) -> None:
        begun.set()
        assert goes_on.wait(300)
        write(self, key, payload, used=used)

    monkeypatch.setattr(BlockFiles, "write", slow)
    first.keep(1)
    assert begun.wait(300)
    first.keep(2, 3, 4)
    assert first.files.counts.dropped == 1
    goes_on.set()
    first.written(4)
    assert [first.files.holds(KEYS[number]) for number in (1, 2, 3, 4)] == [True, True, True, False]


def test_the_longest_unused_go_first_and_of_one_prompt_the_deepest(run, monkeypatch, tmp_path):
    now = [1_000_000.0]
    monkeypatch.setattr("quire_engine.execution.kv.prefix_files.time.time", lambda: now[0])
    first = run(most=4)
    first.keep(1, 2)
    first.written(2)
    now[0] += 100
    first.keep(3, 4)
    first.written(4)
    now[0] += 100
    first.files.use([KEYS[1], KEYS[2]])  # so that 4 and 3 are the longest unused
    first.keep(5)
    first.written(5)
    assert [first.files.holds(KEYS[number]) for number in (1, 2, 3, 4, 5)] == [True, True, True, False, True]
    again = run(most=4)  # the order is in the files too
    now[0] += 100
    again.keep(6)
    again.written(1)
    again.keep(7)
    again.written(2)
    assert [again.files.holds(KEYS[number]) for number in (1, 2, 3, 5, 6, 7)] == [True, False, False, True, True, True]
    assert len(files_of(tmp_path)) == 4
    again.keep(6, 7, 8, 1, 5)  # of those used at once the deepest goes
    until(lambda: again.files.holds(KEYS[8]))
    assert not again.files.holds(KEYS[5])
    again.keep(6, 7, 8, 1, 5)  # and does not displace its own beginning
    until(lambda: again.files.counts.dropped == 1)
    assert [again.files.holds(KEYS[number]) for number in (6, 7, 8, 1, 5)] == [True, True, True, True, False]


def renamed(path: Path) -> None:
    path.rename(path.with_name(f"{KEYS[1].hex()}.kv"))


@pytest.mark.parametrize(
    ("damage", "bad"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), 2),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), 2),
        (renamed, 1),
        (lambda path: (path.rename(path.with_suffix(".real")), path.symlink_to(path.with_suffix(".real"))), 2),
        (Path.unlink, 2),
    ],
    ids=["truncated", "changed", "of another content", "a link", "gone"],
)
def test_a_file_that_is_not_as_it_was_written_is_refused_with_one_line_and_removed(run, tmp_path, damage, bad, caplog):
    first = run()
    first.keep(1, 2, 3)
    first.written(3)
    damage(next(path for path in files_of(tmp_path) if path.stem == KEYS[2].hex()))
    assert first.read(1, 2, 3) == [1, 2, 3][: bad - 1] + [None] * (4 - bad)
    until(lambda: first.files.counts.refused == 1)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"the file of KV block {KEYS[bad].hex()[:16]} was damaged, foreign or gone: it is computed" in line
    assert not first.files.holds(KEYS[bad])
    first.files.close(5)
    first.files.close = lambda *_: None
    assert f"{KEYS[bad].hex()}.kv" not in {path.name for path in files_of(tmp_path)}


def test_a_file_of_another_layout_is_foreign_wherever_it_lies(run, tmp_path):
    run(b"one").keep(1)
    other = run(b"another")
    assert not other.files.holds(KEYS[1])
    (path,) = files_of(tmp_path)
    os.rename(path, other.files._files.folder / path.name)
    third = run(b"another")
    assert third.files.holds(KEYS[1])
    assert third.read(1) == [None]
    until(lambda: not files_of(tmp_path))


def test_what_is_removed_is_gone_though_it_was_being_written(run, tmp_path, monkeypatch):
    first, begun, goes_on = run(), Event(), Event()
    write = BlockFiles.write

    def slow(self: BlockFiles, key: bytes, payload: bytes, *, used: int | None = None) -> None:
        begun.set()
        assert goes_on.wait(300)
        write(self, key, payload, used=used)

    first.keep(1)
    first.written(1)
    monkeypatch.setattr(BlockFiles, "write", slow)
    first.keep(2, 3)
    assert begun.wait(300)
    assert first.files.clear() == 1
    goes_on.set()
    again = run()
    assert again.files.counts.blocks == 0
    assert files_of(tmp_path) == []


def test_an_emptied_store_answers_those_who_wait(run):
    first = run()
    first.keep(1)
    first.written(1)
    first.files.read([KEYS[1]])
    first.files.clear()
    first.files.wait(300)
    assert first.files.take() == [(KEYS[1], None)]


def test_a_full_disk_ends_the_writing_with_one_line(run, monkeypatch, caplog):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    first = run()
    first.keep(1)
    first.written(1)
    monkeypatch.setattr("quire_engine.execution.kv.block_files.os.replace", full)
    first.keep(2, 3, 4)
    until(lambda: "written no more" in caplog.text)
    first.keep(5)
    assert caplog.text.count("written no more: [Errno 28] No space left on device") == 1
    assert first.read(1) == [1]


def test_a_disk_that_may_only_be_read_is_read(run, tmp_path, monkeypatch, caplog):
    run().keep(1)
    run(b"other")  # closes the first
    opening = os.open

    def read_only(path: object, flags: int, *rest: object, **named: object) -> int:
        if flags & os.O_RDWR:
            raise OSError(30, "Read-only file system")
        return opening(path, flags, *rest, **named)

    monkeypatch.setattr("quire_engine.execution.kv.block_files.os.open", read_only)
    again = run()
    assert "read and not written" in caplog.text
    assert again.read(1) == [1]
    again.keep(2)
    assert again.files.counts.dropped == again.files.counts.written == 0


def test_engines_of_one_server_have_a_folder_each_and_other_servers_are_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr("quire_engine.execution.kv.block_files._PATIENCE", 0.1)
    first = run(places=2)
    second = run(places=2, beside=True)
    first.keep(1)
    second.keep(1, 2)
    with pytest.raises(ConfigError, match="in use by another server"):
        run(places=2, beside=True)
    first.written(1)
    second.written(2)
    assert len(files_of(tmp_path)) == 3


def test_a_read_that_fails_in_any_way_is_a_block_that_is_not_there(run, monkeypatch):
    kept = run()
    kept.keep(1, 2)
    kept.written(2)

    def fail(_files: BlockFiles, _key: bytes) -> bytes:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(BlockFiles, "read", fail)
        assert kept.read(1) == [None]
    assert kept.read(2) == [2]

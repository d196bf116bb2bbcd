"""The store of batches: what a process that ends anywhere leaves behind is whole, and each line has one result."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_engine.contract.errors import ConfigError
from quire_server.batches import runner
from quire_server.batches.records import INPUT, Batch, Line, LineProblem, Owner, StoredFile, new_batch_id
from quire_server.batches.store import BatchStore, NoRoom
from quire_server.batches.usage import BatchUsage

OWNER = Owner(name="key 1", key_digest="01")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    opened = BatchStore(tmp_path / "kept")
    yield opened
    opened.close()


def kept(store: BatchStore, content: bytes = b"x", **fields: object) -> StoredFile:
    file_id, target = store.new_content()
    target.write(content)
    file = StoredFile(
        **{
            "id": file_id,
            "owner": OWNER.name,
            "name": "in.jsonl",
            "purpose": INPUT,
            "num_bytes": len(content),
            "created_at": store.now(),
            **fields,
        }
    )
    assert store.add_file(file, target)
    return file


def line_of(number: int) -> Line:
    return Line(number=number, custom_id=f"c{number}", offset=number, size=1)


def begun(store: BatchStore, num_lines: int = 3, **fields: object) -> Batch:
    batch = Batch(
        **{
            "id": new_batch_id(),
            "owner": OWNER,
            "endpoint": "/v1/completions",
            "input_file": kept(store).id,
            "window": "24h",
            "metadata": {"a": "b"},
            "status": "validating",
            "created_at": store.now(),
            "expires_at": store.now() + 86_400,
            "times": {},
            **fields,
        }
    )
    assert store.add_batch(batch, most_unfinished=100)
    assert store.add_lines(batch, [line_of(n) for n in range(1, num_lines + 1)]) == []
    found = store.begin(batch.id, model="m")
    assert found is not None
    return found


def unfinished(line: Line) -> bytes:
    return f"none {line.custom_id}".encode()


def used(result: bytes) -> BatchUsage:
    return BatchUsage(input_tokens=len(result), output_tokens=1)


def killed(folder: Path, to: Path) -> BatchStore:
    """A store on what a process that was killed now has left."""
    shutil.copytree(folder, to)
    return BatchStore(to)


def test_a_line_keeps_its_first_result(store: BatchStore) -> None:
    batch = begun(store)
    for result in (b"one", b"two"):
        store.finish_line(batch, line_of(2), result, ok=True)
    found = store.batch(batch.id)
    assert found is not None
    assert (found.total, found.completed, found.failed) == (3, 1, 0)
    assert [line.number for line in store.open_lines(batch.id, after=0, limit=9)] == [1, 3]
    assert [line.number for line in store.open_lines(batch.id, after=1, limit=9)] == [3]
    assert store.num_unfinished_lines() == 2


def test_outputs_are_in_the_order_of_the_lines(store: BatchStore) -> None:
    batch = begun(store, 1500)
    with store._changes():  # at once, since each is on the disk before the next one
        for number in range(1500, 0, -1):
            store.finish_line(batch, line_of(number), b"%d" % number, ok=number % 3 != 0)
    assert store.end_lines(batch.id, "completed") is not None
    ended = store.finalize(batch.id, unfinished, used)
    assert ended is not None
    assert (ended.status, ended.completed, ended.failed) == ("completed", 1000, 500)
    assert ended.usage == BatchUsage(input_tokens=sum(len(str(n)) for n in range(1, 1501)), output_tokens=1500)
    found = store.batch(batch.id)
    assert found is not None
    assert found.usage == ended.usage
    assert ended.output_file is not None
    assert ended.error_file is not None
    output, error = (store.content(each).read_bytes().split() for each in (ended.output_file, ended.error_file))
    assert output == [b"%d" % n for n in range(1, 1501) if n % 3]
    assert error == [b"%d" % n for n in range(1, 1501) if n % 3 == 0]
    assert store.finalize(batch.id, unfinished, used) is None
    file = store.file(OWNER.name, ended.output_file)
    assert file is not None
    assert file.num_bytes == store.content(file.id).stat().st_size


def test_each_state_survives_a_kill(store: BatchStore, tmp_path: Path) -> None:
    batch = begun(store)
    store.finish_line(batch, line_of(1), b"one", ok=True)
    again = killed(tmp_path / "kept", tmp_path / "running")
    assert again.unfinished() == store.unfinished()
    assert [line.number for line in again.open_lines(batch.id, after=0, limit=9)] == [2, 3]
    again.close()
    store.finish_line(batch, line_of(2), b"two", ok=True)
    store.finish_line(batch, line_of(3), b"three", ok=False)
    store.end_lines(batch.id, "completed")
    # It was killed while it wrote the output: the file has no row, and is written again.
    leftover, content = store.new_content()
    content.write(b"half")
    content.flush()
    again = killed(tmp_path / "kept", tmp_path / "ending")
    assert not again.content(leftover).exists()
    ended = again.finalize(batch.id, unfinished, used)
    assert ended is not None
    assert ended.output_file is not None
    assert again.content(ended.output_file).read_bytes() == b"one\ntwo\n"
    assert ended.usage == BatchUsage(input_tokens=11, output_tokens=3)
    assert len(list((tmp_path / "ending" / "files").iterdir())) == 3
    again.close()
    content.close()


def test_what_was_not_run_is_told_at_the_end(store: BatchStore) -> None:
    batch = begun(store)
    store.finish_line(batch, line_of(2), b"two", ok=True)
    cancelled = store.cancel(OWNER.name, batch.id)
    assert cancelled is not None
    assert cancelled.status == "cancelling"
    assert store.end_lines(batch.id, "completed") is None, "it ends already"
    ended = store.finalize(batch.id, unfinished, used)
    assert ended is not None
    assert (ended.status, ended.total, ended.completed, ended.failed) == ("cancelled", 3, 1, 2)
    assert ended.error_file is not None
    assert store.content(ended.error_file).read_bytes() == b"none c1\nnone c3\n"
    assert ended.times.keys() >= {"in_progress", "cancelling", "cancelled"}


def test_the_same_id_twice_is_found_over_all_lines(store: BatchStore) -> None:
    batch = begun(store, 2)
    twice = [Line(number=3, custom_id="c1", offset=3, size=1), Line(number=4, custom_id="c4", offset=4, size=1)]
    assert store.add_lines(batch, twice) == twice[:1]
    other = begun(store, 2)
    assert other.total == 2, "another batch may have the same ids"


def test_a_wrong_input_ends_a_batch(store: BatchStore) -> None:
    batch = begun(store)
    store.fail(batch.id, [LineProblem(code="a", message="b")])
    assert [each.status for each in store.unfinished()] == ["in_progress"], "its input was right before"
    fresh = Batch(**{**{name: getattr(batch, name) for name in batch.__dataclass_fields__}, "id": "b2", "total": 0})
    assert store.add_batch(fresh, most_unfinished=2)
    assert not store.add_batch(fresh, most_unfinished=2)


def test_files_that_are_over_go_unless_a_batch_reads_them(store: BatchStore, tmp_path: Path) -> None:
    old, read = kept(store, expires_at=store.now()), kept(store, expires_at=store.now())
    begun(store, input_file=read.id)
    new = kept(store, expires_at=store.now() + 1000)
    assert store.file(OWNER.name, old.id) is None
    assert store.delete_expired() == 1
    assert not store.content(old.id).exists()
    assert store.content(read.id).exists()
    assert store.file("another", new.id) is None
    found = store.files(OWNER.name, purpose=None, after=None, limit=9, newest_first=True)
    assert new in found
    assert old not in found


def test_folders_that_cannot_work_are_refused(store: BatchStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another server uses it"):
        BatchStore(tmp_path / "kept")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--batch-dir .*below: cannot be used"):
        BatchStore(tmp_path / "file" / "below")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "batches.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="its database cannot be used"):
        BatchStore(tmp_path / "broken")
    later = tmp_path / "later"
    BatchStore(later).close()
    with sqlite3.connect(later / "batches.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="another version"):
        BatchStore(later)
    with pytest.raises(ConfigError, match="another version"):
        BatchStore(later)  # the lock was given back


def test_uploads_under_way_and_lines_count_as_their_owners_bytes(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "kept", max_bytes=10_000)
    uploads = [store.begin_upload(owner) for owner in ("a", "a", "b")]
    names = [begun for begun in uploads if begun is not None]
    assert [store.reserve(file_id, 6_000) for file_id, _ in names] == [True, False, True]
    assert store.usage("a") == (2, 6_000), "another owner's are not counted"
    for each in names:
        store.drop_content(*each)
    assert store.usage("a") == (0, 0)
    batch = begun(store, 3)
    charged = store.usage(OWNER.name)[1]
    assert store.finish_line(batch, line_of(1), b"x" * 2_000, ok=True)
    assert store.finish_line(batch, line_of(1), b"y" * 3_000, ok=True), "the first one stays"
    used = store.usage(OWNER.name)[1]
    assert charged < used < charged + 2_000
    assert not store.finish_line(batch, line_of(2), b"x" * 9_000, ok=True)
    assert store.finish_line(batch, line_of(2), b"refused", ok=False)
    assert store.usage(OWNER.name)[1] == used, "a refusal was charged from the beginning"
    again = killed(tmp_path / "kept", tmp_path / "again")
    assert again.usage(OWNER.name)[1] == used
    again.close()
    store.end_lines(batch.id, "completed")
    ended = store.finalize(batch.id, unfinished, lambda _: BatchUsage())
    assert ended is not None
    files = [store.content(each).stat().st_size for each in (ended.output_file, ended.error_file) if each]
    assert store.usage(OWNER.name) == (3, 1 + sum(files))
    store.close()


def test_a_batch_whose_refusals_alone_would_be_too_many_bytes_adds_no_line(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, max_bytes=10_000)
    batch = begun(store, 3)
    before = store.usage(OWNER.name)
    with pytest.raises(NoRoom):
        store.add_lines(batch, [line_of(n) for n in range(10, 40)])
    assert store.usage(OWNER.name) == before
    assert len(store.open_lines(batch.id, after=0, limit=99)) == 3
    store.close()


@pytest.mark.parametrize("custom_id", ["a", "\x01" * 512, "\U0001f600" * 512], ids=["short", "escaped", "wide"])
def test_every_refusal_has_the_room_that_is_kept_for_it(store: BatchStore, custom_id: str) -> None:
    store.max_bytes = 1 << 16
    line = Line(number=50_000, custom_id=custom_id, offset=0, size=1)
    batch = begun(store, 0)
    assert store.add_lines(batch, [line]) == []
    store.max_bytes = store.usage(OWNER.name)[1]
    for error in (runner._NO_ROOM, runner._TOO_LARGE, runner._EXPIRED, runner._CANCELLED):
        assert store.finish_line(batch, line, runner._result(batch.id, line, error=error), ok=False)
        store._db.execute("UPDATE lines SET ok = NULL, result = NULL")


def test_files_and_ended_batches_are_bounded_by_number(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_server.batches.store.MAX_ENDED", 2)
    monkeypatch.setattr("quire_server.batches.store.MAX_FILES", 4)
    running = begun(store)
    ids = []
    for number in range(4):
        batch = begun(store, created_at=store.now() + number)
        ids.append(batch.id)
        store.end_lines(batch.id, "completed")
        store.finalize(batch.id, unfinished, used)
    begun(store, created_at=store.now() + 9)
    listed = [each.id for each in store.batches(OWNER.name, after=None, limit=99)]
    assert listed[1:] == [*reversed(ids[2:]), running.id], "the oldest that have ended are forgotten"
    assert store.begin_upload(OWNER.name) is None
    first, second = store.begin_upload("b"), store.begin_upload("b")
    assert first is not None
    assert second is not None
    assert store.usage("b") == (2, 0), "an upload counts before its first byte"
    for each in (first, second):
        store.drop_content(*each)


def test_the_database_shrinks_when_a_batch_has_ended(store: BatchStore, tmp_path: Path) -> None:
    batch = begun(store)
    file = tmp_path / "kept" / "batches.sqlite"
    store.finish_line(batch, line_of(1), bytes(4 << 20), ok=True)
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    large = file.stat().st_size
    assert large > 4 << 20
    store.end_lines(batch.id, "completed")
    store.finalize(batch.id, unfinished, used)
    store.shrink()
    assert file.stat().st_size < large / 10

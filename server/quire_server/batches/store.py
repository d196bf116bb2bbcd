"""Files and batches on disk: an SQLite database with the rows, and a folder with the files' contents.

Owns the folder and its lock. Promises: what a call has returned is on the disk, whatever ends the process; a line of a
batch has at most one result; a file has a row only while its content is whole; no owner has more bytes than it may, of
files, uploads under way, and lines of unfinished batches, each with room for the refusal that it may end with. Every
method waits for the disk: call them in the thread of `run`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from quire_engine.contract.errors import ConfigError
from quire_server.batches.records import OUTPUT, UNFINISHED, Batch, Line, LineProblem, Status, StoredFile, new_file_id
from quire_server.batches.usage import BatchUsage

T = TypeVar("T")
_VERSION = 1  # of the schema
_SCHEMA = """
CREATE TABLE files (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL, num_bytes INTEGER NOT NULL,
  created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE INDEX files_of ON files (owner, created_at);
CREATE TABLE batches (
  id TEXT PRIMARY KEY, owner TEXT NOT NULL, input_file TEXT NOT NULL, status TEXT NOT NULL, created_at INTEGER NOT NULL,
  total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL, told BLOB NOT NULL
);
CREATE INDEX batches_of ON batches (owner, created_at);
CREATE INDEX batches_in ON batches (status);
CREATE TABLE lines (
  batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, offset INTEGER NOT NULL, size INTEGER NOT NULL,
  ok INTEGER, result BLOB,
  PRIMARY KEY (batch, number), UNIQUE (batch, custom_id)
) WITHOUT ROWID;
"""
_INCREMENTAL = 2  # SQLite's number for files that shrink when they are asked to
_MOST_JOURNAL = 16 << 20  # bytes that the journal keeps after a larger one
_GIVEN_BACK = 2_000  # pages of 4 KiB at once
_COPIED = 512  # results that are read at once for the output files
MAX_FILES = 10_000  # of one owner
MAX_ENDED = 1_000  # batches of one owner that have ended and are still known
_ROW = 64  # bytes of a line's row and its entry in the index, beside its custom_id in each
_REFUSAL = 448  # bytes of a refused line's result, beside its custom_id
_ESCAPED = 6  # bytes of JSON for one byte of a custom_id
# The bytes of a line that its owner is charged for: its row, and its result or the refusal that it may end with.
_CHARGE = (
    f"{_ROW} + 2 * length(CAST(custom_id AS BLOB))"
    f" + max({_REFUSAL} + {_ESCAPED} * length(CAST(custom_id AS BLOB)), coalesce(length(result), 0))"
)


class BatchStore:
    """The store of one server. Raises ConfigError where the folder cannot be used, or another server uses it."""

    def __init__(self, folder: Path, *, max_bytes: int = sys.maxsize, clock: Callable[[], float] = time.time) -> None:
        """`max_bytes`: of one owner."""
        self.max_bytes = max_bytes
        self._folder = folder
        self._contents = folder / "files"
        self._clock = clock
        try:
            self._contents.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _locked(folder)
        except OSError as error:
            raise ConfigError(f"--batch-dir {folder}: cannot be used: {error.strerror}") from None
        try:
            self._db = _opened(folder / "batches.sqlite")
            self._sweep_contents()
        except (sqlite3.Error, OSError) as error:
            self._lock.close()
            raise ConfigError(f"--batch-dir {folder}: its database cannot be used: {error}") from None
        self._uploads: dict[str, tuple[str, int]] = {}  # owner and bytes so far of contents that are being written
        rows = self._db.execute(
            f"SELECT owner, sum({_CHARGE}) FROM lines JOIN batches ON batches.id = batch GROUP BY owner"
        )
        self._line_bytes = Counter(dict(rows.fetchall()))  # what lines are charged, by owner
        # One thread: SQLite has one writer at a time anyway, and calls are in the order in which they were made.
        self._thread = ThreadPoolExecutor(1, "batches")

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """The result of one of the methods below, in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def close(self) -> None:
        """End the thread and give the folder to others. Waits for calls under way."""
        self._thread.shutdown()
        self._db.close()
        self._lock.close()

    def now(self) -> int:
        return int(self._clock())

    # -- Files

    def new_content(self) -> tuple[str, IO[bytes]]:
        """The id of a new file, and its content to be written; `add_file` keeps it, `drop_content` forgets it."""
        file_id = new_file_id()
        return file_id, self.content(file_id).open("xb")

    def content(self, file_id: str) -> Path:
        """Return the path of a stored file's content."""
        return self._contents / file_id

    def begin_upload(self, owner: str) -> tuple[str, IO[bytes]] | None:
        """Open a new file as `new_content` does, as an upload of its owner's; None: the owner has `MAX_FILES` files."""
        if self.usage(owner)[0] >= MAX_FILES:
            return None
        file_id, content = self.new_content()
        self._uploads[file_id] = owner, 0
        return file_id, content

    def reserve(self, file_id: str, num_bytes: int) -> bool:
        """Count further bytes of an upload; False, and nothing is counted, if its owner would have too many."""
        owner, before = self._uploads[file_id]
        if not self.has_room(owner, num_bytes):
            return False
        self._uploads[file_id] = owner, before + num_bytes
        return True

    def add_file(self, file: StoredFile, content: IO[bytes]) -> bool:
        """Keep a file whose content is written; False, and it is not kept, if its owner would have too many bytes."""
        _to_disk(content)
        self._sync_folder()
        self._uploads.pop(file.id, None)
        if not self.has_room(file.owner, file.num_bytes):
            return False
        with self._changes():
            self._insert_file(file)
        return True

    def drop_content(self, file_id: str, content: IO[bytes]) -> None:
        """Forget a content that was not kept."""
        self._uploads.pop(file_id, None)
        content.close()
        self.content(file_id).unlink(missing_ok=True)

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """The owner's file, unless it has expired."""
        rows = self._db.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner))
        found = next((_file(row) for row in rows), None)
        return None if found is None or (found.expires_at or self.now() + 1) <= self.now() else found

    def files(
        self, owner: str, *, purpose: str | None, after: StoredFile | None, limit: int, newest_first: bool
    ) -> list[StoredFile]:
        """Return at most `limit` of the owner's files behind `after`, in the order of their creation."""
        sign, order = ("<", "DESC") if newest_first else (">", "ASC")
        where = "owner = ? AND (expires_at IS NULL OR expires_at > ?)"
        values: list[Any] = [owner, self.now()]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        if after is not None:
            where, values = f"{where} AND (created_at, id) {sign} (?, ?)", [*values, after.created_at, after.id]
        rows = self._db.execute(
            f"SELECT * FROM files WHERE {where} ORDER BY created_at {order}, id {order} LIMIT ?", [*values, limit]
        )
        return [_file(row) for row in rows]

    def usage(self, owner: str) -> tuple[int, int]:
        """The number of the owner's files, and their bytes; uploads under way and lines of batches are counted too."""
        rows = self._db.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE owner = ?", (owner,))
        number, num_bytes = next(rows)
        coming = [size for each, size in self._uploads.values() if each == owner]
        return number + len(coming), num_bytes + sum(coming) + self._line_bytes[owner]

    def has_room(self, owner: str, num_bytes: int = 1) -> bool:
        """Whether the owner may have so many bytes more."""
        return self.usage(owner)[1] + num_bytes <= self.max_bytes

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Delete a file; False while an unfinished batch reads it."""
        if self._is_read(file_id):
            return False
        with self._changes():
            self._db.execute("DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner))
        self.content(file_id).unlink(missing_ok=True)
        return True

    def delete_expired(self) -> int:
        """Delete the files whose time is over, except those that unfinished batches read; their number."""
        rows = self._db.execute("SELECT id, owner FROM files WHERE expires_at <= ?", (self.now(),)).fetchall()
        return sum(self.delete_file(owner, file_id) for file_id, owner in rows)

    # -- Batches

    def add_batch(self, batch: Batch, *, most_unfinished: int) -> bool:
        """Add a new batch; False, and nothing is added, where its owner has so many unfinished ones.

        Of those that have ended the owner's newest `MAX_ENDED` stay.
        """
        rows = self._db.execute(
            f"SELECT count(*) FROM batches WHERE owner = ? AND status IN ({_marks(UNFINISHED)})",
            (batch.owner.name, *UNFINISHED),
        )
        if next(rows)[0] >= most_unfinished:
            return False
        with self._changes():
            self._db.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", _batch_row(batch))
            self._db.execute(
                "DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE owner = ?"
                f" AND status NOT IN ({_marks(UNFINISHED)}) ORDER BY created_at DESC, id DESC LIMIT -1 OFFSET ?)",
                (batch.owner.name, *UNFINISHED, MAX_ENDED),
            )
        return True

    def batch(self, batch_id: str, owner: str | None = None) -> Batch | None:
        """A batch by its id, with `owner` only if it belongs to it."""
        found = next((_batch(row) for row in self._db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,))), None)
        return None if found is None or owner not in (None, found.owner.name) else found

    def batches(self, owner: str, *, after: Batch | None, limit: int) -> list[Batch]:
        """Return at most `limit` of the owner's batches behind `after`, the newest first."""
        where, values = "owner = ?", list[Any]([owner])
        if after is not None:
            where, values = f"{where} AND (created_at, id) < (?, ?)", [owner, after.created_at, after.id]
        rows = self._db.execute(
            f"SELECT * FROM batches WHERE {where} ORDER BY created_at DESC, id DESC LIMIT ?", [*values, limit]
        )
        return [_batch(row) for row in rows]

    def unfinished(self) -> list[Batch]:
        """The unfinished batches of all owners, the oldest first."""
        rows = self._db.execute(
            f"SELECT * FROM batches WHERE status IN ({_marks(UNFINISHED)}) ORDER BY created_at, id", UNFINISHED
        )
        return [_batch(row) for row in rows]

    def num_unfinished_lines(self) -> int:
        rows = self._db.execute(
            f"SELECT coalesce(sum(total - completed - failed), 0) FROM batches WHERE status IN ({_marks(UNFINISHED)})",
            UNFINISHED,
        )
        number: int = next(rows)[0]
        return number

    def cancel(self, owner: str, batch_id: str) -> Batch | None:
        """Begin to cancel the owner's batch, if it is not about to end; as it is then. None: there is no such batch."""
        batch = self.batch(batch_id, owner)
        if batch is None or batch.status not in ("validating", "in_progress"):
            return batch
        return self._enter(replace(batch, ends_as="cancelled"), "cancelling")

    # -- The lines of a batch

    def begin_check(self, batch_id: str) -> bool:
        """Forget the lines that were read of a batch's input; False where it does not wait for its check any more."""
        batch = self.batch(batch_id)
        if batch is None or batch.status != "validating":
            return False
        self._forget_lines(batch)
        return True

    def _forget_lines(self, batch: Batch) -> None:
        with self._changes():
            charged = self._delete_lines(batch.id)
        self._line_bytes[batch.owner.name] -= charged

    def _delete_lines(self, batch_id: str) -> int:
        """Delete the batch's lines; the bytes that they are charged, until the transaction has ended."""
        sums = self._db.execute(f"SELECT coalesce(sum({_CHARGE}), 0) FROM lines WHERE batch = ?", (batch_id,))
        charged: int = next(sums)[0]
        self._db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
        return charged

    def add_lines(self, batch: Batch, lines: Sequence[Line]) -> list[Line]:
        """Add lines that were read; those whose custom_id was there already are not added, but returned.

        Raises NoRoom, and adds none, if the batch's owner would have too many bytes.
        """
        known, batch_id = [], batch.id
        if not self.has_room(batch.owner.name, sum(map(_charge, lines))):
            raise NoRoom
        with self._changes():
            for line in lines:
                added = self._db.execute(
                    "INSERT INTO lines (batch, number, custom_id, offset, size) VALUES (?, ?, ?, ?, ?)"
                    " ON CONFLICT (batch, custom_id) DO NOTHING",
                    (batch_id, line.number, line.custom_id, line.offset, line.size),
                )
                if not added.rowcount:
                    known.append(line)
        self._line_bytes[batch.owner.name] += sum(map(_charge, lines)) - sum(map(_charge, known))
        return known

    def begin(self, batch_id: str, *, model: str | None) -> Batch | None:
        """The input has been read and is right. None: the batch does not wait for it any more."""
        batch = self.batch(batch_id)
        if batch is None or batch.status != "validating":
            return None
        total = next(self._db.execute("SELECT count(*) FROM lines WHERE batch = ?", (batch_id,)))[0]
        return self._enter(replace(batch, model=model, total=total), "in_progress")

    def fail(self, batch_id: str, problems: Sequence[LineProblem]) -> None:
        """The input has been read and is wrong."""
        batch = self.batch(batch_id)
        if batch is None or batch.status != "validating":
            return
        self._forget_lines(batch)
        self._enter(replace(batch, problems=tuple(problems)), "failed")

    def open_lines(self, batch_id: str, *, after: int, limit: int) -> list[Line]:
        """The first lines behind number `after` without a result."""
        rows = self._db.execute(
            "SELECT number, custom_id, offset, size FROM lines WHERE batch = ? AND number > ? AND ok IS NULL"
            " ORDER BY number LIMIT ?",
            (batch_id, after, limit),
        )
        return [Line(number=row[0], custom_id=row[1], offset=row[2], size=row[3]) for row in rows]

    def finish_line(self, batch: Batch, line: Line, result: bytes, *, ok: bool) -> bool:
        """Keep a line's result, a JSON object; a line that has one keeps that.

        False, and nothing is kept, if the owner would have too many bytes. A refusal always has room: it is charged
        from the moment at which the line was added.
        """
        further = max(len(result) - _refusal_bytes(line), 0)
        if further and not self.has_room(batch.owner.name, further):
            return False
        with self._changes():
            changed = self._db.execute(
                "UPDATE lines SET ok = ?, result = ? WHERE batch = ? AND number = ? AND ok IS NULL",
                (ok, result, batch.id, line.number),
            )
            if changed.rowcount:
                column = "completed" if ok else "failed"
                self._db.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (batch.id,))
        self._line_bytes[batch.owner.name] += further if changed.rowcount else 0
        return True

    def end_lines(self, batch_id: str, ends_as: Status) -> Batch | None:
        """No further line is run: the batch is about to end in this state. None: it ends already."""
        batch = self.batch(batch_id)
        if batch is None or batch.status not in ("validating", "in_progress"):
            return None
        return self._enter(replace(batch, ends_as=ends_as), "finalizing")

    def finalize(
        self, batch_id: str, unfinished: Callable[[Line], bytes], used: Callable[[bytes], BatchUsage]
    ) -> Batch | None:
        """Write the output files of a batch whose lines have ended, and end it. None: there is nothing to end.

        `unfinished`: the result of a line that was not run; `used`: the tokens of a result. The files of a call
        that was interrupted are written anew.
        """
        batch = self.batch(batch_id)
        if batch is None or batch.status not in ("finalizing", "cancelling"):
            return None
        files, left = (
            [],
            next(self._db.execute("SELECT count(*) FROM lines WHERE batch = ? AND ok IS NULL", (batch_id,)))[0],
        )
        usage = BatchUsage()

        def counted(results: Iterator[bytes]) -> Iterator[bytes]:
            nonlocal usage
            for result in results:
                usage += used(result)
                yield result

        for is_output in (True, False):
            results = counted(self._results(batch_id, unfinished, is_output=is_output))
            first = next(results, None)
            files.append(None if first is None else self._write(batch, first, results, is_output=is_output))
        self._sync_folder()
        output, error = files
        with self._changes():
            for file in filter(None, files):
                self._insert_file(file)
            charged = self._delete_lines(batch_id)
            ended = replace(
                batch,
                failed=batch.failed + left,
                usage=usage,
                output_file=None if output is None else output.id,
                error_file=None if error is None else error.id,
            )
            ended = self._enter(ended, batch.ends_as)
        self._line_bytes[batch.owner.name] -= charged
        return ended

    def _results(self, batch_id: str, unfinished: Callable[[Line], bytes], *, is_output: bool) -> Iterator[bytes]:
        """The results for one of the files, in the order of the lines."""
        where, after = "ok = 1" if is_output else "ok IS NOT 1", 0
        while True:
            rows = self._db.execute(
                "SELECT number, custom_id, offset, size, result FROM lines"
                f" WHERE batch = ? AND number > ? AND {where} ORDER BY number LIMIT ?",
                (batch_id, after, _COPIED),
            ).fetchall()
            if not rows:
                return
            for number, custom_id, offset, size, result in rows:
                line = Line(number=number, custom_id=custom_id, offset=offset, size=size)
                yield unfinished(line) if result is None else result
            after = rows[-1][0]

    def _write(self, batch: Batch, first: bytes, results: Iterator[bytes], *, is_output: bool) -> StoredFile:
        file_id, content = self.new_content()
        with content:
            content.write(first + b"\n")
            for result in results:
                content.write(result + b"\n")
            _to_disk(content, close=False)
            num_bytes = content.tell()
        return StoredFile(
            id=file_id,
            owner=batch.owner.name,
            name=f"{batch.id}_{'output' if is_output else 'error'}.jsonl",
            purpose=OUTPUT,
            num_bytes=num_bytes,
            created_at=self.now(),
            expires_at=None if batch.output_seconds is None else self.now() + batch.output_seconds,
        )

    def shrink(self) -> None:
        """Give some of the database's unused pages back to the system: those of lines whose batches have ended."""
        if next(self._db.execute("PRAGMA freelist_count"))[0]:
            self._db.executescript(f"PRAGMA incremental_vacuum({_GIVEN_BACK})")  # `execute` frees one page
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # before this the file is as long as it was

    def _enter(self, batch: Batch, status: Status) -> Batch:
        """Store the batch in another state."""
        batch = replace(batch, status=status, times={**batch.times, status: self.now()})
        *_, told = row = _batch_row(batch)
        with self._changes():
            self._db.execute(
                "UPDATE batches SET status = ?, total = ?, completed = ?, failed = ?, told = ? WHERE id = ?",
                (status, *row[5:8], told, batch.id),
            )
        return batch

    def _insert_file(self, file: StoredFile) -> None:
        self._db.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.id, file.owner, file.name, file.purpose, file.num_bytes, file.created_at, file.expires_at),
        )

    def _is_read(self, file_id: str) -> bool:
        rows = self._db.execute(
            f"SELECT 1 FROM batches WHERE input_file = ? AND status IN ({_marks(UNFINISHED)})", (file_id, *UNFINISHED)
        )
        return next(rows, None) is not None

    @contextmanager
    def _changes(self) -> Iterator[None]:
        """One transaction, or a part of the one around it."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _sweep_contents(self) -> None:
        """Delete contents without a row: of uploads and outputs that a process has left unfinished."""
        known = {row[0] for row in self._db.execute("SELECT id FROM files")}
        for path in self._contents.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    def _sync_folder(self) -> None:
        """Names of new files are on the disk after this."""
        folder = os.open(self._contents, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class NoRoom(Exception):
    """The owner of a batch would have more bytes than it may."""


def _refusal_bytes(line: Line) -> int:
    """The most bytes of the result of a line that was not answered."""
    return _REFUSAL + _ESCAPED * len(line.custom_id.encode())


def _charge(line: Line) -> int:
    """Return the bytes that `_CHARGE` counts for a line without a result."""
    return _ROW + 2 * len(line.custom_id.encode()) + _refusal_bytes(line)


def _locked(folder: Path) -> IO[bytes]:
    """The folder's lock, which the system gives back when the process ends. Raises ConfigError, OSError."""
    lock = (folder / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(f"--batch-dir {folder}: another server uses it; each needs a folder of its own") from None
    return lock


def _opened(path: Path) -> sqlite3.Connection:
    # The thread of `run` is the only one that uses it after this.
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    if next(db.execute("PRAGMA auto_vacuum"))[0] != _INCREMENTAL:  # before the first table, or by writing it anew
        db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
        db.execute("VACUUM")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute(f"PRAGMA journal_size_limit = {_MOST_JOURNAL}")
    db.execute("PRAGMA synchronous = FULL")  # a transaction survives the machine too
    version = next(db.execute("PRAGMA user_version"))[0]
    if version == 0:
        db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
    elif version != _VERSION:
        db.close()
        raise sqlite3.DatabaseError(f"it was written by another version of this program (schema {version})")
    return db


def _to_disk(content: IO[bytes], *, close: bool = True) -> None:
    content.flush()
    os.fsync(content.fileno())
    if close:
        content.close()


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" for _ in values)


def _file(row: Sequence[Any]) -> StoredFile:
    names = ("id", "owner", "name", "purpose", "num_bytes", "created_at", "expires_at")
    return StoredFile(**dict(zip(names, row, strict=True)))


def _batch_row(batch: Batch) -> tuple[Any, ...]:
    """The columns that are searched and counted, and the rest as JSON."""
    return (
        *(batch.id, batch.owner.name, batch.input_file, batch.status, batch.created_at),
        *(batch.total, batch.completed, batch.failed, msgspec.json.encode(batch)),
    )


def _batch(row: Sequence[Any]) -> Batch:
    told = msgspec.json.decode(row[8], type=Batch)
    return replace(told, status=row[3], total=row[5], completed=row[6], failed=row[7])

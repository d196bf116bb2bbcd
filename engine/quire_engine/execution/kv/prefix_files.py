"""Prefix blocks of a pool in host memory, kept in files: threads write and read them beside the steps.

Promises: no caller waits for the disk; what a file gets is a block that held its content until all of it was copied; a
disk that fails ends the writing and nothing else. Must not know: requests.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from heapq import nsmallest
from pathlib import Path

from quire_engine.contract.block_store import Payload, StoreCounts
from quire_engine.execution.kv.block_files import BlockFiles
from quire_engine.execution.kv.pool_rows import PoolRows

_log = logging.getLogger(__name__)
MOST_WAITING = 1024  # blocks to write; more are left out
_MOST_ARRIVED = 16 << 20  # bytes that are read and not taken yet: more would keep running streams from their next step
_EVICTED_SHARE = 64  # with the bound met, one file of so many goes at a time, since finding the oldest reads all ages
_PERIOD = 60  # seconds: uses within one count as simultaneous
_NS, _DEPTH_NS = 1_000_000_000, 1_000
_NICENESS = 10  # of the writing thread: digests of blocks must not take a core from a step
_CLOSE_SECONDS = 1.0  # for blocks that are not written yet; the parent of the process waits twice as long
_WEIGHT = 0.2  # of the newest block in the mean time of reading


def open_prefix_files(directory: Path, layout: bytes, pool: PoolRows, most: int, *, places: int = 1) -> PrefixFiles:
    """The files of a pool on the host, at most `most` of them. `BlockFiles` has the rest."""
    files = BlockFiles(directory, layout, num_bytes=pool.num_bytes, places=places)
    return PrefixFiles(files, pool, most)


class PrefixFiles:
    """See `block_store.BlockStore`. One thread writes and removes, another one reads.

    Nothing is copied until a block is written, so what waits costs no memory. A block's age is the time of its last
    use. Of those used in one period the deeper ones count as older: a prefix is of no use without its beginning.
    """

    def __init__(self, files: BlockFiles, pool: PoolRows, most: int) -> None:
        """`pool`: the KV pool on the host; `most`: files at most."""
        self.seconds_per_block = 0.0  # of reading one; 0: none was read yet
        self._files, self._rows, self._most = files, pool, most
        self._changed = threading.Condition()  # guards all below; never held while the disk works or a block is copied
        found = files.found()
        surplus = max(0, len(found) - most)  # the bound may have been larger before
        self._used = dict(found[surplus:])  # by key of every file: the time of its last use, less its depth, ns
        self._writes: dict[bytes, tuple[int, int]] = {}  # by key what waits, in order: (block, depth)
        self._writing: bytes | None = None  # the key that is being written, if it is still to be kept
        self._busy = False  # the writing thread
        self._touched: dict[bytes, int] = {}  # times of use that the files do not have yet
        self._removals = [key for key, _ in found[:surplus]]
        self._reads: deque[deque[bytes]] = deque()
        self._arrived: deque[tuple[bytes, bytes | None]] = deque()
        self._arrived_bytes = 0
        self._written = self._read = self._dropped = self._refused = 0
        self._can_write, self._closed = not files.why_unwritable, False
        _log.info("%s: %d KV blocks of earlier runs", files.folder, len(self._used))
        for work, name in ((self._write_all, "kv writer"), (self._read_all, "kv reader")):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def counts(self) -> StoreCounts:
        """The files there are, and what happened to blocks since the start."""
        return StoreCounts(
            blocks=len(self._used),
            written=self._written,
            read=self._read,
            dropped=self._dropped,
            refused=self._refused,
        )

    def holds(self, key: bytes) -> bool:
        """Whether there is a file for the block."""
        return key in self._used

    def use(self, keys: Sequence[bytes]) -> None:
        """A request begins with these blocks, the first ones of its prompt: those that have files are used now."""
        period = int(time.time()) // _PERIOD * _PERIOD * _NS
        with self._changed:
            for depth, key in enumerate(keys):
                used = period - depth * _DEPTH_NS
                if self._used.get(key, used) != used:
                    self._used[key] = self._touched[key] = used
            if self._touched:
                self._changed.notify_all()

    def offer(self, key: bytes, block: int, depth: int) -> None:
        """Write this block of the pool soon. Its content stays until `lose`. `depth`: blocks before it."""
        with self._changed:
            if key in self._used or key in self._writes or key == self._writing or not self._can_write:
                return
            if len(self._writes) >= MOST_WAITING:
                self._dropped += 1
                return
            self._writes[key] = block, depth
            self._changed.notify_all()

    def lose(self, key: bytes) -> None:
        """The pool is about to write something else where this content was."""
        if self._writes:
            with self._changed:
                self._dropped += self._writes.pop(key, None) is not None

    def remove(self, keys: Iterable[bytes]) -> None:
        """Forget contents that must not be read again, neither now nor after a restart."""
        with self._changed:
            for key in keys:
                self._writes.pop(key, None)
                self._used.pop(key, None)
                self._touched.pop(key, None)
                if key == self._writing:
                    self._writing = None
                self._removals.append(key)
            self._changed.notify_all()

    def clear(self) -> int:
        """Remove all files; returns their number."""
        with self._changed:
            keys = [*self._used, *self._writes, *([] if self._writing is None else [self._writing])]
            num_files = len(self._used)
            coming = [key for key, _ in self._arrived] + [key for reading in self._reads for key in reading]
            self._reads.clear()
            self._arrived, self._arrived_bytes = deque((key, None) for key in coming), 0
        self.remove(keys)
        return num_files

    def read(self, keys: Iterable[bytes]) -> None:
        """Begin to read these blocks, in this order; `take` has them when they are there."""
        with self._changed:
            self._reads.append(deque(keys))
            self._changed.notify_all()

    def take(self) -> list[tuple[bytes, bytes | None]]:
        """The blocks that were read since the last call, by key; None for those that could not be read."""
        if not self._arrived:
            return []
        with self._changed:
            taken = list(self._arrived)
            self._arrived.clear()
            self._arrived_bytes = 0
            self._changed.notify_all()
        return taken

    def cancel(self) -> None:
        """Read nothing more, and drop the blocks that were not taken."""
        with self._changed:
            self._reads.clear()
            self._arrived.clear()
            self._arrived_bytes = 0
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until one more block has been read, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived, seconds)

    def place(self, payload: Payload, block: int) -> None:
        """Copy a block that was read into the pool; call it between steps."""
        self._rows.place(payload, block)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Write what waits, as far as that goes in so many seconds, and let another process have the folder."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._busy or self._writes or self._removals), seconds)
            self._closed = True
            self._changed.notify_all()
        self._files.close()

    def _write_all(self) -> None:
        with suppress(OSError):  # where threads cannot have a priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._writes or self._touched or self._removals)
                if self._closed:
                    return
                removals, touched = self._removals, self._touched
                self._removals, self._touched = [], {}
                key, (block, depth) = next(iter(self._writes.items()), (b"", (0, 0)))
                self._writing, self._busy = key or None, True
            try:
                for each in removals:
                    self._files.remove(each)
                for each, used in touched.items():
                    self._files.touch(each, used)
                if key:
                    self._write(key, block, depth)
            except Exception as error:  # the server serves without files as well
                with self._changed:
                    self._can_write = False
                    self._dropped += len(self._writes)
                    self._writes.clear()
                _log.error("%s: KV blocks are written no more: %s", self._files.folder, error)
            with self._changed:
                self._writing, self._busy = None, False
                self._changed.notify_all()

    def _write(self, key: bytes, block: int, depth: int) -> None:
        used = int(time.time()) // _PERIOD * _PERIOD * _NS - depth * _DEPTH_NS
        payload = self._rows.content(block)
        with self._changed:
            # The pool calls `lose` before it writes to a block: if the key still waits, its content was copied.
            if self._writes.pop(key, None) is None:
                return
        if not self._make_room(used):
            with self._changed:
                self._dropped += 1
            return
        self._files.write(key, payload, used=used)
        with self._changed:
            if self._writing == key:
                self._used[key] = used
                self._written += 1
            # Else it was removed meanwhile: its name is among the removals, which come next.

    def _make_room(self, used: int) -> bool:
        """Remove the longest unused files where there are as many as may be; False if a new one would be of these."""
        with self._changed:
            surplus = len(self._used) + 1 - self._most
            ages = dict(self._used) if surplus > 0 else {}
        if surplus <= 0:
            return True
        oldest = nsmallest(max(surplus, self._most // _EVICTED_SHARE), ages, key=ages.__getitem__)
        if not oldest or ages[oldest[0]] >= used:
            return False
        for key in oldest:
            with self._changed:
                if self._used.get(key) != ages[key]:
                    continue  # used meanwhile, or removed
                del self._used[key]
                self._touched.pop(key, None)
            self._files.remove(key)
        return True

    def _read_file(self, key: bytes) -> bytes | None:
        """The block of a file; None where it cannot be read, for whatever reason: a request waits for the answer."""
        try:
            return self._files.read(key)
        except Exception:
            _log.exception("%s: the file of KV block %s cannot be read", self._files.folder, key.hex()[:16])
            return None

    def _read_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._reads and self._arrived_bytes < _MOST_ARRIVED))
                if self._closed:
                    return
                keys = self._reads[0]
                key = keys[0]
            started = time.perf_counter()
            payload = self._read_file(key)
            seconds = time.perf_counter() - started
            if payload is None:
                self.remove([key])
                _log.warning(
                    "%s: the file of KV block %s was damaged, foreign or gone: it is computed, and removed",
                    self._files.folder,
                    key.hex()[:16],
                )
            with self._changed:
                self._refused += payload is None
                if not self._reads or self._reads[0] is not keys:
                    continue  # cancelled
                if payload is None:
                    self._arrived.extend((each, None) for each in keys)
                    keys.clear()
                else:
                    known = self.seconds_per_block
                    self.seconds_per_block = known + _WEIGHT * (seconds - known) if known else seconds
                    self._read += 1
                    self._arrived.append((keys.popleft(), payload))
                    self._arrived_bytes += len(payload)
                if not keys:
                    self._reads.popleft()
                self._changed.notify_all()

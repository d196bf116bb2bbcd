"""An image into its file, in a thread behind those who fill it.

Promises: a file has its name when it is whole and on the disk, not before; where it cannot be written, a line says why
and nothing else happens. Must not know: what is in an image, who fills it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread

from quire_engine.execution.packed.folder import NoRoom, PackedFolder, say
from quire_engine.execution.packed.header import HEADER_BYTES
from quire_engine.memory_plan import bytes_text

_AT_ONCE = 8 << 20
_PAUSE = 0.004  # seconds between two of them: the thread shares the memory and the cores with steps
_SYNCED_AT_ONCE = 256 << 20  # what the disk still has to take when all is written


class _Stopped(Exception):
    """There will be no image to write."""


class FileWriter:
    """Writes one image, as far as it is ready."""

    def __init__(self, folder: PackedFolder, key: str, fd: int, most_bytes: int) -> None:
        """`fd`: of the image's memory. `most_bytes`: that it may come to."""
        self._folder, self._path = folder, folder.file(key)
        self._fd = os.dup(fd)
        self._most_bytes = most_bytes
        self._changed = Condition()  # guards the three below
        self._ready = HEADER_BYTES
        self._ended = False  # no more will be ready, and the header is
        self._stopped = False
        self._kept = False
        self._thread = Thread(target=self._work, name="packed weights", daemon=True)
        self._thread.start()

    def advance(self, ready: int) -> None:
        """What lies before is as it will be, but for the header."""
        with self._changed:
            self._ready = max(self._ready, ready)
            self._changed.notify()

    def finish(self, num_bytes: int) -> None:
        """The image is sealed."""
        with self._changed:
            self._ready, self._ended = num_bytes, True
            self._changed.notify()

    def stop(self) -> None:
        """Give up: there will be no image."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self.wait()

    def wait(self) -> Path | None:
        """Until there is nothing more to do: the file, if there is one now."""
        self._thread.join()
        return self._path if self._kept else None

    def _work(self) -> None:
        try:
            with self._folder.writing():
                if not self._path.exists():  # else another process has written it meanwhile
                    self._folder.make_room(self._most_bytes)
                    self._write(self._folder.unfinished(self._path))
                self._kept = True
        except _Stopped:
            pass
        except (NoRoom, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            say(f"the packed weights are not kept in {self._folder.path}: {reason}; the next start packs them again")
        finally:
            os.close(self._fd)

    def _write(self, temporary: Path) -> None:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.lseek(handle, HEADER_BYTES, os.SEEK_SET)
            num_bytes = self._follow(handle)
            os.pwrite(handle, os.pread(self._fd, HEADER_BYTES, 0), 0)
            os.fsync(handle)
            temporary.rename(self._path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        finally:
            os.close(handle)
        self._sync_folder()
        say(f"the packed weights are kept in {self._path} ({bytes_text(num_bytes)}) for the next start")

    def _follow(self, handle: int) -> int:
        """Copy all behind the header as it gets ready; the image's size."""
        at = synced = HEADER_BYTES
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready > at or self._ended or self._stopped)  # noqa: B023
                ready, ended, stopped = self._ready, self._ended, self._stopped
            if stopped:
                raise _Stopped
            if at == ready and ended:
                return at
            at += os.sendfile(handle, self._fd, at, min(ready - at, _AT_ONCE))
            if at - synced >= _SYNCED_AT_ONCE:
                os.fdatasync(handle)
                synced = at
            time.sleep(_PAUSE)

    def _sync_folder(self) -> None:
        """The new name, too, survives a loss of power."""
        handle = os.open(self._folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

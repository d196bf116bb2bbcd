"""Opens and reads the files that operators and users name, so that none of them can hold up or fill the reader.

Promises: only regular files are opened, and opening never waits; no more bytes and no more seconds are taken than a
caller allows; whatever is wrong with a path or a file is an OSError with a reason in `strerror`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

MAX_TEXT_BYTES = 64 << 20  # a configuration is kilobytes, the largest tokenizer some tens of megabytes
MAX_SECONDS = 60.0  # for one file, however slow its disk
_PIECE_BYTES = 1 << 20


def open_plain(path: Path | str) -> BinaryIO:
    """Open a regular file for reading. A pipe, a device or a folder raises OSError at once, as does a bad path."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError as error:  # a null byte, or half a surrogate pair
        raise OSError(errno.EINVAL, f"no path: {error}", str(path)) from None
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "not a plain file", str(path))
    return os.fdopen(handle, "rb")


def read_plain(path: Path | str, most: int = MAX_TEXT_BYTES, *, seconds: float = MAX_SECONDS) -> bytes:
    """All bytes of a regular file. Raises OSError, also for more than `most` bytes or `seconds`."""
    begun = time.monotonic()
    pieces: list[bytes] = []
    left = most + 1
    with open_plain(path) as file:
        while left and (piece := file.read(min(_PIECE_BYTES, left))):
            pieces.append(piece)
            left -= len(piece)
            if time.monotonic() - begun > seconds:
                raise OSError(errno.ETIMEDOUT, f"not read within {seconds:g} seconds", str(path))
    if not left:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", str(path))
    return b"".join(pieces)


def read_plain_text(path: Path | str, most: int = MAX_TEXT_BYTES) -> str:
    """A regular file's text in UTF-8. Raises OSError, and UnicodeDecodeError."""
    return read_plain(path, most).decode("utf-8")


def is_plain(path: Path | str) -> bool:
    """Whether there is a regular file by this name. A name that no file can have is none."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False

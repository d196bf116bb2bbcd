"""Folders whose files may be loaded: owned by this user, not writable by others, with trusted parents.

Promises: only this user and root can change or replace a trusted file; every check is made on an open descriptor, so
that nothing can be swapped between check and use. Must not know: torch.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Parent folders need only search permission; systems without O_PATH need read permission.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe that was planted in place of a file would block until it has a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UntrustedFolder(OSError):
    """A folder or file that must not be loaded from, or a folder that cannot be made; names it and the fix.

    An OSError: code that can do without an unreadable cache can do without this one.
    """


def trusted(path: Path) -> Path:
    """The absolute path of a trusted folder, made with mode 0700 if it is missing.

    Raises UntrustedFolder.
    """
    absolute = _absolute(path)
    with _opened(absolute, make=True):
        return absolute


def open_trusted(path: Path) -> int:
    """A descriptor for reading a file in a trusted folder: a plain file of this user without other hard links.

    The caller closes it. Raises FileNotFoundError, UntrustedFolder.
    """
    absolute = _absolute(path)
    with _opened(absolute.parent, make=False) as folder:
        try:
            descriptor = os.open(absolute.name, _FILE, dir_fd=folder)
        except FileNotFoundError:
            raise
        except OSError as error:
            if _is_link(absolute.name, folder):
                raise UntrustedFolder(f"{absolute} is a link; remove it") from None
            raise UntrustedFolder(f"{absolute} cannot be read: {error.strerror}") from error
    try:
        _check_file(absolute, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _absolute(path: Path) -> Path:
    """Resolve `..` in the text, which is right since links are refused."""
    return Path(os.path.abspath(path))


@contextmanager
def _opened(absolute: Path, *, make: bool) -> Iterator[int]:
    """A descriptor of the folder. Walks from the root; each folder is opened within the one before, then checked."""
    here = Path(absolute.anchor)
    descriptor = os.open(here, _FOLDER)
    try:
        _check_folder(here, os.fstat(descriptor), is_last=here == absolute)
        for name in absolute.parts[1:]:
            here /= name
            inner = _enter(descriptor, here, make=make)
            os.close(descriptor)
            descriptor = inner
            _check_folder(here, os.fstat(descriptor), is_last=here == absolute)
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(parent: int, here: Path, *, make: bool) -> int:
    try:
        return os.open(here.name, _FOLDER, dir_fd=parent)
    except FileNotFoundError as error:
        if not make:
            raise FileNotFoundError(error.errno, error.strerror, str(here)) from None
    except OSError as error:
        if _is_link(here.name, parent):
            raise UntrustedFolder(f"{here} is a link; put a folder of your own in its place") from None
        raise UntrustedFolder(f"{here} cannot be used: {error.strerror}") from error
    try:
        os.mkdir(here.name, 0o700, dir_fd=parent)
    except FileExistsError:  # made meanwhile; the next check tests its owner
        pass
    except OSError as error:
        raise UntrustedFolder(f"{here} cannot be made: {error.strerror}") from error
    return _enter(parent, here, make=False)


def _check_folder(here: Path, status: os.stat_result, *, is_last: bool) -> None:
    owners = (os.geteuid(),) if is_last else (os.geteuid(), _ROOT)
    if status.st_uid not in owners:
        raise UntrustedFolder(f"{here} belongs to another user ({status.st_uid}); remove it, or chown it to yours")
    # In a folder like /tmp others cannot remove or rename our folders, and theirs fail the next check.
    is_shared = bool(status.st_mode & stat.S_ISVTX) and not is_last
    if status.st_mode & _OTHERS_WRITE and not is_shared:
        raise UntrustedFolder(f"{here} can be written to by others; chmod go-w {here}")


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UntrustedFolder(f"{path} is not a plain file; remove it")
    if status.st_uid != os.geteuid():
        raise UntrustedFolder(f"{path} belongs to another user ({status.st_uid}); remove it")
    if status.st_mode & _OTHERS_WRITE:
        raise UntrustedFolder(f"{path} can be written to by others; remove it")
    if status.st_nlink != 1:
        raise UntrustedFolder(f"{path} has another name as well, by which it may be changed; remove it")


def _is_link(name: str, folder: int) -> bool:
    """Used only for error messages."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False

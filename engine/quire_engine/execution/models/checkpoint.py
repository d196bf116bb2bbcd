"""The safetensors files of a checkpoint directory, memory-mapped and checked before anything is read.

Shard names stay inside the directory; every failure is a ModelLoadError that names the file.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire_engine.errors import ModelLoadError
from quire_engine.execution.models.config import read_json_object

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STORED = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a value
_MAX_LISTED = 8  # names in one error message
_MAPS = Path("/proc/self/maps")
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _File(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class _Entry(NamedTuple):
    path: Path
    file: _File
    pages: FilePages
    stored: str  # the tensor's name in the file


class StoredTensors(Protocol):
    """The part of `Checkpoint` that reads tensors, also of one whose tensors are converted."""

    @property
    def num_bytes(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def tensor(self, name: str) -> Tensor: ...
    def is_done(self, name: str) -> bool: ...
    def done(self, name: str) -> int: ...
    def error(self, name: str, reason: str) -> ModelLoadError: ...


class Checkpoint:
    """Tensors by name over all files. Valid while `open_checkpoint`'s block runs."""

    def __init__(self, path: Path, entries: dict[str, _Entry]) -> None:
        self._path = path
        self._entries = entries
        self._addresses: dict[str, int] = {}  # of the tensors that were read
        self._done: set[str] = set()

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    @property
    def num_bytes(self) -> int:
        """Of all tensors, as they are stored."""
        return sum(self._size(name) for name in self._entries)

    def _size(self, name: str) -> int:
        stored = self._slice(name)
        return math.prod(stored.get_shape()) * _STORED.get(stored.get_dtype(), 0)

    def _slice(self, name: str) -> _Slice:
        entry = self._entries[name]
        return entry.file.get_slice(entry.stored)

    def is_done(self, name: str) -> bool:
        """Whether `done` was called for it."""
        return name in self._done

    def done(self, name: str) -> int:
        """A tensor will not be read again, so its pages are released; returns its bytes as stored."""
        self._done.add(name)
        self.release(name)
        return self._size(name)

    def release(self, name: str) -> None:
        """Release the pages of the mapped file that a tensor lies in; reading it again would page them in."""
        if name in self._addresses:
            self._entries[name].pages.release(self._addresses[name], self._size(name))

    def error(self, name: str, reason: str) -> ModelLoadError:
        entry = self._entries[name]
        return ModelLoadError(f"{entry.path}: tensor {entry.stored} {reason}")

    def drop(self, unwanted: Callable[[str], bool]) -> None:
        """Forget tensors that are known to be redundant."""
        self._entries = {name: entry for name, entry in self._entries.items() if not unwanted(name)}

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Know tensors by other names; messages keep those of the file."""
        self._entries = {name_of(name): entry for name, entry in self._entries.items()}

    def require(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check that exactly these tensors are there, in these shapes and a supported dtype."""
        if missing := shapes.keys() - self._entries.keys():
            raise ModelLoadError(f"{self._path}: missing tensors: {_listed(missing)}")
        if leftover := self._entries.keys() - shapes.keys():
            raise ModelLoadError(f"{self._path}: tensors that this configuration does not use: {_listed(leftover)}")
        for name, shape in shapes.items():
            stored = self._slice(name)
            if tuple(stored.get_shape()) != shape:
                raise self.error(name, f"has shape {stored.get_shape()}, the configuration implies {list(shape)}")
            if stored.get_dtype() not in _STORED:
                raise self.error(name, f"is stored as {stored.get_dtype()}; supported: {', '.join(_STORED)}")

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored, on the CPU, possibly a view of the mapped file."""
        entry = self._entries[name]
        try:
            tensor = entry.file.get_tensor(entry.stored)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{entry.path}: cannot read {name}: {error}") from error
        self._addresses[name] = tensor.data_ptr()
        return tensor


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open all safetensors files of a directory."""
    with ExitStack() as stack:
        entries: dict[str, _Entry] = {}
        for file_path, promised in _files(path).items():
            try:
                if file_path.exists() and not file_path.is_file():  # a pipe would be waited for
                    raise ModelLoadError(f"{file_path}: not a plain file")
                file: _File = stack.enter_context(safe_open(str(file_path), framework="pt", device="cpu"))
                names = file.keys()
            except FileNotFoundError:
                raise ModelLoadError(f"{file_path}: missing; the checkpoint is incomplete") from None
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"{file_path}: not a complete safetensors file: {error}") from error
            pages = FilePages(file_path)
            if absent := promised - set(names):
                raise ModelLoadError(f"{file_path}: lacks tensors that {_INDEX} places there: {_listed(absent)}")
            for name in names:
                if name in entries:
                    raise ModelLoadError(f"{file_path}: tensor {name} is also in {entries[name].path.name}")
                entries[name] = _Entry(file_path, file, pages, name)
        yield Checkpoint(path, entries)


def _files(path: Path) -> dict[Path, set[str]]:
    """The files to open and, where there is an index, the tensors that it places in each."""
    if not path.is_dir():
        raise ModelLoadError(f"{path}: not a directory")
    if (path / _INDEX).exists():
        return _indexed_files(path)
    if (path / _SINGLE).exists():
        return {path / _SINGLE: set()}
    pickled = next(iter(sorted(path.glob("*.bin")) + sorted(path.glob("*.pt*"))), None)
    if pickled is not None:
        raise ModelLoadError(f"{pickled}: pickled weights are never loaded; convert the checkpoint to safetensors")
    raise ModelLoadError(f"{path}: holds neither {_SINGLE} nor {_INDEX}")


def _indexed_files(path: Path) -> dict[Path, set[str]]:
    index = path / _INDEX
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map must be a non-empty object")
    promised: dict[Path, set[str]] = {}
    for tensor, shard in weight_map.items():
        # A plain file name: no separator of any system, nothing that could climb out of the directory.
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or set(shard) & set("/\\:\0"):
            raise ModelLoadError(f"{index}: {shard!r} is not the name of a safetensors file in this directory")
        promised.setdefault(path / shard, set()).add(tensor)
    return promised


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_MAX_LISTED])
    more = len(names) - _MAX_LISTED
    return shown if more <= 0 else f"{shown} and {more} more"


def fingerprint(path: Path) -> str:
    """A short digest that changes when a file of the checkpoint is replaced or written to; contents are not read."""
    digest = hashlib.sha256()
    for file in [*sorted(path.glob("*.safetensors*")), path / "config.json"]:
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode())
    return digest.hexdigest()[:16]


class FilePages:
    """The resident pages of one file, which is mapped by the time that `release` is first called.

    Memory outside of that file's mapping is never touched, whatever address is passed. Released pages are read from the
    file again on access.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ranges: list[tuple[int, int]] | None = None

    def release(self, address: int, num_bytes: int) -> None:
        """Release the whole pages in [address, address + num_bytes), if the file is mapped there."""
        if self._ranges is None:
            self._ranges = _mapped(self._path)
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(begin <= first and last <= end for begin, end in self._ranges):
            _libc.madvise(first, last - first, mmap.MADV_DONTNEED)


def _mapped(path: Path) -> list[tuple[int, int]]:
    """The address ranges at which the file is mapped in this process; none where the system does not tell."""
    found: list[tuple[int, int]] = []
    with suppress(OSError):
        status = path.stat()
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "
        for line in _MAPS.read_text(errors="replace").splitlines():
            if wanted in line:
                begin, end = line.split(" ", 1)[0].split("-")
                found.append((int(begin, 16), int(end, 16)))
    return found

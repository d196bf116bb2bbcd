"""The safetensors or GGUF files of a checkpoint directory, memory-mapped and checked before anything is read.

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
from typing import NamedTuple, Protocol, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.options import read_json_object
from quire_engine.gguf import PLAIN, StoredTensor, read_gguf
from quire_engine.plain_files import open_plain, read_plain
from quire_kernels.kernel_set import KernelSet
from quire_kernels.stored import StoredKind, StoredMatrix

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
STORED = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a value
_BYTES = {
    **STORED,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
}  # also of the tensors that others are decoded from
_MAX_LISTED = 8  # names in one error message
_MAPS = Path("/proc/self/maps")
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


_Made = TypeVar("_Made")


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...


class _File(Protocol):
    """An open file of tensors."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class _Entry(NamedTuple):
    path: Path
    file: _File
    pages: FilePages
    stored: str  # the tensor's name in the file
    num_bytes: int


class _Decoded(NamedTuple):
    parts: dict[str, _Entry]
    shape: tuple[int, ...]
    decode: Callable[[dict[str, Tensor]], Tensor]
    sharers: int = 1  # tensors that are decoded from these parts, one of them this
    kept: Kept | None = None


class Kept(NamedTuple):
    """A quantised matrix in the form in which it is stored: what reads it, or gives None where it has no such form."""

    read: Callable[[dict[str, Tensor]], StoredMatrix | None]
    kind: StoredKind
    group_size: int
    beside: float | None = None  # bits of a group beside its codes; None: a scale and a zero point


class Made(NamedTuple):
    """The shape of a tensor, and what makes it of stored ones, by their roles."""

    shape: tuple[int, ...]
    decode: Callable[[dict[str, Tensor]], Tensor]
    kept: Kept | None = None


class StoredSize(NamedTuple):
    """A quantised matrix of a checkpoint."""

    kind: StoredKind
    group_size: int
    rows: int
    columns: int
    beside: float | None = None  # as of `Kept`

    def saved(self, kernels: KernelSet, usual: float) -> float:
        """Bits that it takes less than one of `usual` bits a value, where the kernels keep it as it is."""
        if kernels.stored_bits is None:
            return 0.0
        bits = kernels.stored_bits(self.kind, self.group_size, self.columns, self.beside)
        return 0.0 if bits is None else (usual - bits) * self.rows * self.columns


class StoredTensors(Protocol):
    """The part of `Checkpoint` that reads tensors, also of one whose tensors are converted."""

    @property
    def num_bytes(self) -> int: ...
    def __contains__(self, name: str) -> bool: ...
    def tensor(self, name: str) -> Tensor: ...
    def stored_matrix(self, name: str) -> StoredMatrix | None: ...
    def is_done(self, name: str) -> bool: ...
    def done(self, name: str) -> int: ...
    def error(self, name: str, reason: str) -> ModelLoadError: ...


class Checkpoint:
    """Tensors by name over all files. Valid while `open_checkpoint`'s block runs."""

    def __init__(self, path: Path, entries: dict[str, _Entry]) -> None:
        self._path = path
        self._entries = entries
        self._decoded: dict[str, _Decoded] = {}
        # Matrices that were read last, since the next part of one may follow.
        self._latest: tuple[str, Tensor] | None = None
        self._latest_kept: tuple[str, StoredMatrix | None] | None = None
        self._addresses: dict[str, int] = {}  # of the tensors that were read, by their names in the files
        self._done: set[str] = set()
        self._undone: dict[str, int] = {}  # of the tensors that others share, how many still want them

    @property
    def names(self) -> set[str]:
        return self._entries.keys() | self._decoded.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._entries or name in self._decoded

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors as they are stored."""
        return sum(self._size(name) for name in self.names)

    def _size(self, name: str) -> int:
        sharers = self._decoded[name].sharers if name in self._decoded else 1
        return sum(entry.num_bytes for entry in self._stored(name)) // sharers

    def _stored(self, name: str) -> list[_Entry]:
        """The entries that a tensor is read from; messages name the first."""
        if name in self._decoded:
            return list(self._decoded[name].parts.values())
        return [self._entries[name]]

    def stored_as(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The type, as the files' format names it, and the shape of a tensor of the files."""
        found = _slice(self._entries[name])
        return found.get_dtype(), tuple(found.get_shape())

    def decode(
        self,
        name: str,
        parts: dict[str, str],
        shape: tuple[int, ...],
        decode: Callable[[dict[str, Tensor]], Tensor],
        kept: Kept | None = None,
    ) -> None:
        """Know a tensor that `decode` computes from stored ones, given by their roles, in the place of those.

        `kept` gives the same matrix as it is stored. A ValueError of the two becomes a ModelLoadError that names the
        first of the parts.
        """
        found = {role: self._entries.pop(part) for role, part in parts.items()}
        self._decoded[name] = _Decoded(found, shape, decode, kept=kept)

    def stored_sizes(self) -> Iterator[tuple[str, StoredSize]]:
        """Yield the name and size of each quantised matrix that may be kept as it is stored."""
        for name, found in self._decoded.items():
            kept = found.kept
            if kept is not None:
                yield name, StoredSize(kept.kind, kept.group_size, found.shape[0], found.shape[1], kept.beside)

    def divide(
        self,
        parts: dict[str, str],
        into: dict[str, Made],
    ) -> None:
        """Know several tensors in the place of stored ones, given by their roles: by name a shape and what decodes it.

        A ValueError while one is decoded becomes a ModelLoadError that names the first of the stored ones.
        """
        found = {role: self._entries.pop(part) for role, part in parts.items()}
        self._undone[next(iter(found.values())).stored] = len(into)
        for name, made in into.items():
            self._decoded[name] = _Decoded(found, made.shape, made.decode, sharers=len(into), kept=made.kept)

    def is_done(self, name: str) -> bool:
        """Whether `done` was called for it."""
        return name in self._done

    def done(self, name: str) -> int:
        """A tensor will not be read again, so its pages are released; returns its bytes as stored."""
        self._done.add(name)
        first = self._stored(name)[0].stored
        self._undone[first] = self._undone.get(first, 1) - 1
        if self._undone[first] <= 0:
            self.release(name)
        return self._size(name)

    def release(self, name: str) -> None:
        """Release the pages of the mapped file that a tensor lies in; reading it again would page them in."""
        self._latest = self._latest_kept = None
        for entry in self._stored(name):
            if entry.stored in self._addresses:
                entry.pages.release(self._addresses[entry.stored], entry.num_bytes)

    def error(self, name: str, reason: str) -> ModelLoadError:
        entry = self._stored(name)[0]
        return ModelLoadError(f"{entry.path}: tensor {entry.stored} {reason}")

    def drop(self, unwanted: Callable[[str], bool]) -> None:
        """Forget tensors that are known to be redundant."""
        self._entries = {name: entry for name, entry in self._entries.items() if not unwanted(name)}
        self._decoded = {name: found for name, found in self._decoded.items() if not unwanted(name)}

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Know tensors by other names; messages keep those of the file."""
        self._entries = {name_of(name): entry for name, entry in self._entries.items()}
        self._decoded = {name_of(name): found for name, found in self._decoded.items()}

    def require(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check that exactly these tensors are there, in these shapes and a supported dtype."""
        if missing := shapes.keys() - self.names:
            raise ModelLoadError(f"{self._path}: missing tensors: {_listed(missing)}")
        if leftover := self.names - shapes.keys():
            raise ModelLoadError(f"{self._path}: tensors that this configuration does not use: {_listed(leftover)}")
        for name, shape in shapes.items():
            decoded = self._decoded.get(name)
            dtype, found = self.stored_as(name) if decoded is None else ("", decoded.shape)
            if found != shape:
                made = "" if decoded is None else f"decoded as {name} "
                raise self.error(name, f"{made}has shape {list(found)}, the configuration implies {list(shape)}")
            if decoded is None and dtype not in STORED:
                raise self.error(name, f"is stored as {dtype}; supported: {', '.join(STORED)}")

    def tensor(self, name: str) -> Tensor:
        """A tensor as stored, on the CPU, possibly a view of the mapped file; a quantised one as float32."""
        if name not in self._decoded:
            return self._read(self._entries[name])
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # before its successor is there
            self._latest = name, self._made(name, self._decoded[name].decode)
        return self._latest[1]

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        """A quantised matrix as it is stored; None: it is not, or its columns are in another order."""
        kept = self._decoded[name].kept if name in self._decoded else None
        if kept is None:
            return None
        if self._latest_kept is None or self._latest_kept[0] != name:
            self._latest_kept = None
            self._latest_kept = name, self._made(name, lambda parts: _finite(kept.read(parts)))
        found = self._latest_kept[1]
        if self.is_done(name):  # a tied head, once more after the embedding
            self.release(name)
        return found

    def _made(self, name: str, make: Callable[[dict[str, Tensor]], _Made]) -> _Made:
        try:
            return make({role: self._read(entry) for role, entry in self._decoded[name].parts.items()})
        except ValueError as error:
            raise self.error(name, str(error)) from None

    def _read(self, entry: _Entry) -> Tensor:
        try:
            tensor = entry.file.get_tensor(entry.stored)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{entry.path}: cannot read {entry.stored}: {error}") from error
        self._addresses[entry.stored] = tensor.data_ptr()
        return tensor


def _finite(matrix: StoredMatrix | None) -> StoredMatrix | None:
    """Raises ValueError for one with numbers that are not, although its scales are."""
    if matrix is not None and not matrix.is_finite():
        raise ValueError("holds values that are not finite numbers")
    return matrix


def _slice(entry: _Entry) -> _Slice:
    return entry.file.get_slice(entry.stored)


def _num_bytes(stored: _Slice) -> int:
    return math.prod(stored.get_shape()) * _BYTES.get(stored.get_dtype(), 0)


class _GgufFile:
    """See `_File`: a mapped GGUF file. Tensors of blocks are read as bytes, [rows, bytes of a row]."""

    def __init__(self, path: Path, tensors: list[StoredTensor]) -> None:
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _GgufSlice:
        return _GgufSlice(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        data = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        dtype = _PLAIN_TYPES.get(tensor.kind.name)
        if dtype is not None:
            return data.view(dtype).view(tensor.shape)
        return data.view(-1, tensor.shape[-1] // tensor.kind.values * tensor.kind.num_bytes)


class _GgufSlice(NamedTuple):
    tensor: StoredTensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return self.tensor.kind.name


_PLAIN_TYPES = dict(zip(PLAIN, (torch.float32, torch.float16, torch.bfloat16), strict=True))


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open all safetensors files of a directory, or the GGUF files of one that has none."""
    if ggufs := gguf_files(path):
        yield _gguf_checkpoint(path, ggufs[0])
        return
    with ExitStack() as stack:
        entries: dict[str, _Entry] = {}
        for file_path, promised in _files(path).items():
            try:
                open_plain(file_path).close()  # the library would wait for a pipe
                file: _File = stack.enter_context(safe_open(str(file_path), framework="pt", device="cpu"))
                names = file.keys()
            except FileNotFoundError:
                raise ModelLoadError(f"{file_path}: missing; the checkpoint is incomplete") from None
            except OSError as error:
                raise ModelLoadError(f"{file_path}: {error.strerror or error}") from error
            except SafetensorError as error:
                raise ModelLoadError(f"{file_path}: not a complete safetensors file: {error}") from error
            pages = FilePages(file_path)
            if absent := promised - set(names):
                raise ModelLoadError(f"{file_path}: lacks tensors that {_INDEX} places there: {_listed(absent)}")
            for name in names:
                if name in entries:
                    raise ModelLoadError(f"{file_path}: tensor {name} is also in {entries[name].path.name}")
                entries[name] = _Entry(file_path, file, pages, name, _num_bytes(file.get_slice(name)))
        yield Checkpoint(path, entries)


def gguf_files(path: Path) -> list[Path]:
    """The GGUF files of a directory without safetensors."""
    return [] if any(path.glob("*.safetensors*")) else sorted(path.glob("*.gguf"))


def _gguf_checkpoint(path: Path, first: Path) -> Checkpoint:
    # Messages name the file itself, and not the link to it that the server has made.
    found = read_gguf(path / first.readlink() if first.is_symlink() else first)
    entries: dict[str, _Entry] = {}
    for file_path in found.files:
        tensors = [tensor for tensor in found.tensors.values() if tensor.file == file_path]
        try:
            file, pages = _GgufFile(file_path, tensors), FilePages(file_path)
        except (OSError, RuntimeError) as error:
            raise ModelLoadError(f"{file_path}: cannot be mapped: {error}") from error
        for tensor in tensors:
            entries[tensor.name] = _Entry(file_path, file, pages, tensor.name, tensor.num_bytes)
    return Checkpoint(found.files[0], entries)


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
    ggufs = gguf_files(path)
    for file in ggufs or [*sorted(path.glob("*.safetensors*")), path / "config.json"]:
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns} {status.st_ino}\n".encode())
    if ggufs:  # whose configuration is derived from them at each start
        digest.update(read_plain(path / "config.json"))
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

"""GGUF files: their metadata and where their tensors lie, each count, length and offset held against the file.

Promises: whatever a file holds, reading it gives its content or one line that names the file and the key; nothing is
allocated that the file is too short for; no tensor's data is read. Must not know: torch.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from quire_engine.contract.errors import ModelLoadError
from quire_engine.plain_files import open_plain, read_plain_text

Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool] | list[str]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_METADATA = 256 << 20  # bytes; a vocabulary of 260,000 tokens with its merges takes 20 MB
_MOST_KEY = 65535  # bytes, as the format has it
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_MOST_ALIGNMENT = 1 << 16
_MOST_SHARDS = 1000
_MOST_SHOWN = 80  # characters of a name or a value in a message
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
# The number types of values, by their numbers in the file: how `struct` names them.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _BOOL, _TEXT, _ARRAY = 6, 7, 8, 9


class Kind(NamedTuple):
    """A type of tensors: rows are made of blocks of so many values and bytes."""

    name: str
    values: int
    num_bytes: int


# The types of whole files by general.file_type, which quantising programs write: what most matrices are stored as.
_FILE_TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S"},
    **{12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K"},
    **{19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL"},
    **{26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16"},
    **{36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4"},
}
_GUESSED = 1024  # is added to a type that the converting program has guessed
_TYPED_NAME = "typed-name"  # a file in a folder that stands for a GGUF file: the name that the user gave
# The types of tensors by their numbers in the file (ggml.h); those that are missing were withdrawn.
KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    9: Kind("Q8_1", 32, 40),
    10: Kind("Q2_K", 256, 84),
    11: Kind("Q3_K", 256, 110),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    15: Kind("Q8_K", 256, 292),
    16: Kind("IQ2_XXS", 256, 66),
    17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98),
    19: Kind("IQ1_S", 256, 50),
    20: Kind("IQ4_NL", 32, 18),
    21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82),
    23: Kind("IQ4_XS", 256, 136),
    24: Kind("I8", 1, 1),
    25: Kind("I16", 1, 2),
    26: Kind("I32", 1, 4),
    27: Kind("I64", 1, 8),
    28: Kind("F64", 1, 8),
    29: Kind("IQ1_M", 256, 56),
    30: Kind("BF16", 1, 2),
    34: Kind("TQ1_0", 256, 54),
    35: Kind("TQ2_0", 256, 66),
    39: Kind("MXFP4", 32, 17),
    40: Kind("NVFP4", 64, 36),
    41: Kind("Q1_0", 128, 18),
}
# The types that the loader decodes, beside plain numbers.
PLAIN = ("F32", "F16", "BF16")
DECODED = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}) | {
    *("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor's place in a file, its type and shape. A matrix [N, K] has its N rows one behind the other."""

    name: str
    kind: Kind
    shape: tuple[int, ...]  # the slowest dimension first, as torch has it; the file has it the other way round
    file: Path
    offset: int  # from the beginning of the file
    num_bytes: int


class Metadata:
    """Typed access to the values of a file, by their keys; those that were asked for are remembered."""

    def __init__(self, file: Path, values: Mapping[str, Value]) -> None:
        self.file = file
        self._values = values
        self._read: set[str] = set()

    def error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file}: {reason}")

    def keys(self) -> set[str]:
        return set(self._values)

    def unread(self, prefix: str) -> list[str]:
        """The keys with this beginning that were not asked for, sorted."""
        return sorted(key for key in self._values if key.startswith(prefix) and key not in self._read)

    def has(self, key: str) -> bool:
        return key in self._values

    def raw(self, key: str) -> Value | None:
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = (1 << 31) - 1) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(f"{key} must be an integer from {least} to {most}, not {shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, at least 0."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30:
            raise self.error(f"{key} must be a number from 0, not {shown(value)}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(f"{key} must be a string, not {shown(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty where there is none."""
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(f"{key} must be a list of strings, not {shown(value)}")
        return [str(each) for each in value]

    def integers(self, key: str) -> list[int] | None:
        """A list of whole numbers; None where there is none."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise self.error(f"{key} must be a list of whole numbers, not {shown(value)}")
        return [int(each) for each in value]

    def floats(self, key: str) -> list[float] | None:
        """A list of finite numbers; None where there is none."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(each, (str, bool)) for each in value):
            raise self.error(f"{key} must be a list of numbers, not {shown(value)}")
        found = [float(each) for each in value]
        if not all(map(math.isfinite, found)):
            raise self.error(f"{key} holds values that are not finite numbers")
        return found

    def _present(self, key: str, default: Scalar | None) -> Value:
        value = self.raw(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"{key} is missing")
        return default


@dataclass(frozen=True, slots=True, kw_only=True)
class Gguf:
    """A model of one file, or of several that belong together; the metadata are the first one's."""

    files: tuple[Path, ...]
    metadata: Metadata
    tensors: dict[str, StoredTensor]

    @property
    def main_type(self) -> str:
        """The type of the file as a whole, such as Q4_K_M: as it says, else the one that most bytes have."""
        said = self.metadata.raw("general.file_type")
        if isinstance(said, int) and (name := _FILE_TYPES.get(said & ~_GUESSED)):
            return name
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.kind.name] = sizes.get(tensor.kind.name, 0) + tensor.num_bytes
        return max(sizes, key=lambda name: sizes[name], default="")

    def floats(self, name: str) -> list[float]:
        """The values of a small tensor of F32. Raises ModelLoadError."""
        tensor = self.tensors[name]
        if tensor.kind.name != "F32" or len(tensor.shape) != 1:
            raise self.metadata.error(f"tensor {name} is {tensor.kind.name} {list(tensor.shape)}, not a row of F32")
        try:
            with open_plain(tensor.file) as source:
                source.seek(tensor.offset)
                data = source.read(tensor.num_bytes)
            return [shortest(each) for each in struct.unpack(f"<{tensor.shape[0]}f", data)]
        except (OSError, struct.error) as error:
            raise ModelLoadError(f"{tensor.file}: cannot read {name}: {error}") from error


def read_gguf(file: Path) -> Gguf:
    """The model that a file holds, or begins. Raises ModelLoadError naming the file and the key."""
    files = shards(file)
    first, tensors = _read(file)
    said = first.integer("split.count", 0)
    if max(said, 1) != len(files):
        raise first.error(f"split.count={said}, the name is that of one of {len(files)}")
    for number, path in enumerate(files[1:], start=1):
        metadata, more = _read(path)
        if metadata.integer("split.no", -1, least=-1) != number or metadata.integer("split.count", 0) != said:
            raise metadata.error(f"split.no and split.count are not {number} and {said}, as the name says")
        for name, tensor in more.items():
            if name in tensors:
                raise metadata.error(f"tensor {shown(name)} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    promised = first.integer("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise first.error(f"split.tensors.count={promised}, but the files hold {len(tensors)} tensors")
    return Gguf(files=tuple(files), metadata=first, tensors=tensors)


def shards(file: Path) -> list[Path]:
    """The files of which this one is the first. Raises ModelLoadError where it is another."""
    match = _SHARD.fullmatch(file.name)
    if match is None:
        return [file]
    number, count = int(match["number"]), int(match["count"])
    names = [
        f"{match['stem']}-{each:05d}-of-{count:05d}{file.suffix}" for each in range(1, min(count, _MOST_SHARDS) + 1)
    ]
    if number != 1 or not 1 <= count <= _MOST_SHARDS:
        raise ModelLoadError(
            f"{file}: one of {count} files; name the first, {file.with_name(names[0] if names else '')}"
        )
    return [file.with_name(name) for name in names]


def keep_typed_name(folder: Path, name: str) -> None:
    """Write down the name that the user gave of the file that a folder stands for. Raises OSError."""
    (folder / _TYPED_NAME).write_text(name, encoding="utf-8")


SAMPLING_SOURCE = "_source"  # key of a generation_config.json that was made of a GGUF file: where its values are from


def typed_name(path: Path | str) -> str:
    """The name for messages: of a folder that stands for a GGUF file, or of a file made in it, the user's own."""
    for folder in (Path(path), Path(path).parent):
        try:
            return read_plain_text(folder / _TYPED_NAME)
        except (OSError, ValueError):
            continue
    return str(path)


def shown(value: object) -> str:
    """A value of an untrusted file for a message of one line."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def shortest(value: float) -> float:
    """The decimal number with the fewest digits of those that round to this float32.

    Values of configurations were written as decimals: 1e-06 is read as that, and not as 9.999999974752427e-07.
    """
    if not math.isfinite(value):
        return value
    packed = struct.pack("<f", value)
    for digits in range(1, 9):
        found = float(f"{value:.{digits}g}")
        if abs(found) < 3.4e38 and struct.pack("<f", found) == packed:
            return found
    return float(f"{value:.9g}")


@dataclass(slots=True)
class _Source:
    """A file that is read from its beginning on, within its size."""

    path: Path
    stream: BinaryIO
    size: int
    at: int = 0
    where: str = "header"  # what is being read, for messages
    known: set[str] = field(default_factory=set)

    def error(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {self.where}: {reason}")

    def need(self, num_bytes: int) -> None:
        """Check that so many bytes follow."""
        if num_bytes > self.size - self.at:
            raise self.error(
                f"{num_bytes} bytes are announced, {self.size - self.at} follow; the file is damaged or cut"
            )
        if self.at + num_bytes > _MOST_METADATA:
            raise self.error(f"more than {_MOST_METADATA >> 20} MiB of metadata")

    def take(self, num_bytes: int) -> bytes:
        self.need(num_bytes)
        data = self.stream.read(num_bytes)
        if len(data) != num_bytes:
            raise self.error("the file has become shorter")
        self.at += num_bytes
        return data

    def integer(self, form: str) -> int:
        return int.from_bytes(self.take(struct.calcsize("<" + form)), "little")

    def text(self, most: int) -> str:
        length = self.integer("Q")
        if length > most:
            raise self.error(f"a string of {length} bytes; at most {most} are possible")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"a string is not UTF-8: {error.reason} at byte {error.start}") from None

    def name(self, what: str) -> str:
        """A key or a tensor's name, which is new."""
        self.where = f"{what} {len(self.known) + 1}"
        name = self.text(_MOST_KEY)
        self.where = f"{what} {shown(name)}"
        if not name or not name.isprintable():
            raise self.error("not a name that can be printed")
        if name in self.known:
            raise self.error("there are two of that name")
        self.known.add(name)
        return name


def _read(path: Path) -> tuple[Metadata, dict[str, StoredTensor]]:
    """One file. Raises ModelLoadError."""
    try:
        with open_plain(path) as stream:
            return _content(_Source(path, stream, os.fstat(stream.fileno()).st_size))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: missing; the model is incomplete") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error


def _content(source: _Source) -> tuple[Metadata, dict[str, StoredTensor]]:
    if source.size < 24 or source.take(4) != _MAGIC:
        raise source.error("not a GGUF file: it does not begin with GGUF")
    version = source.integer("I")
    if version not in _VERSIONS:
        if version & 0xFFFF == 0:
            raise source.error("stored with the most significant byte first, which is not read; convert it again")
        raise source.error(f"version {version} of the format is not read, only {' and '.join(map(str, _VERSIONS))}")
    num_tensors, num_values = source.integer("Q"), source.integer("Q")
    source.need(num_values * 13 + num_tensors * 32)  # bytes of the shortest value and of the shortest tensor's entry
    values = {source.name("key"): _value(source) for _ in range(num_values)}
    metadata = Metadata(source.path, values)
    source.where = "header"
    alignment = metadata.integer("general.alignment", _ALIGNMENT)
    if not 8 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise metadata.error(f"general.alignment={alignment} must be a power of 2 from 8 to {_MOST_ALIGNMENT}")
    source.known = set()
    entries = [_entry(source, alignment) for _ in range(num_tensors)]
    return metadata, _placed(source, entries, alignment)


def _value(source: _Source) -> Value:
    kind = source.integer("I")
    if kind == _TEXT:
        return source.text(_MOST_METADATA)
    if kind != _ARRAY:
        return _numbers(source, kind, 1)[0]
    kind, count = source.integer("I"), source.integer("Q")
    if kind == _ARRAY:
        raise source.error("lists of lists are not read")
    if kind != _TEXT:
        return _numbers(source, kind, count)
    source.need(count * 8)
    return [source.text(_MOST_METADATA) for _ in range(count)]


def _numbers(source: _Source, kind: int, count: int) -> list[int] | list[float] | list[bool]:
    form = _NUMBERS.get(kind)
    if form is None:
        raise source.error(f"{kind} is no type of a value")
    source.need(count * struct.calcsize("<" + form))  # before the product becomes the length of a form
    data = source.take(count * struct.calcsize("<" + form))
    if kind == _BOOL and data.strip(b"\0\1"):
        raise source.error("a truth value is neither 0 nor 1")
    found = list(struct.unpack(f"<{count}{form}", data))
    return [shortest(each) for each in found] if kind == _FLOAT32 and count == 1 else found


class _Entry(NamedTuple):
    name: str
    kind: Kind
    shape: tuple[int, ...]
    offset: int  # from the beginning of the data
    num_bytes: int


def _entry(source: _Source, alignment: int) -> _Entry:
    name = source.name("tensor")
    count = source.integer("I")
    if not 1 <= count <= _MOST_DIMENSIONS:
        raise source.error(f"{count} dimensions; possible are 1 to {_MOST_DIMENSIONS}")
    shape = tuple(source.integer("Q") for _ in range(count))[::-1]
    number, offset = source.integer("I"), source.integer("Q")
    kind = KINDS.get(number)
    if kind is None:
        raise source.error(f"type {number} is unknown; quantise the model again with a present version of llama.cpp")
    if 0 in shape or shape[-1] % kind.values:
        raise source.error(f"shape {list(shape)} is not made of {kind.name} blocks of {kind.values}")
    num_bytes = math.prod(shape) // kind.values * kind.num_bytes
    if offset % alignment:
        raise source.error(f"offset {offset} is not a multiple of {alignment}")
    if num_bytes > source.size or offset > source.size - num_bytes:
        raise source.error(
            f"{kind.name} {list(shape)} at offset {offset} does not fit the file's {source.size} bytes; the file is"
            " damaged or cut"
        )
    return _Entry(name, kind, shape, offset, num_bytes)


def _placed(source: _Source, entries: list[_Entry], alignment: int) -> dict[str, StoredTensor]:
    """The tensors by name, none of which reaches into another or out of the file."""
    begin = -(-source.at // alignment) * alignment
    end, last = 0, ""
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset < end:
            raise source.error(f"{shown(entry.name)} and {shown(last)} lie in the same place")
        end, last = entry.offset + entry.num_bytes, entry.name
    if end and begin + end > source.size:
        raise source.error(
            f"tensor {shown(last)} ends at byte {begin + end} of {source.size}; the file is damaged or cut"
        )
    return {
        entry.name: StoredTensor(
            name=entry.name,
            kind=entry.kind,
            shape=entry.shape,
            file=source.path,
            offset=begin + entry.offset,
            num_bytes=entry.num_bytes,
        )
        for entry in entries
    }

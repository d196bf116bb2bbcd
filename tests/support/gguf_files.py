"""Writes GGUF files: byte for byte as the format's description has it, and as llama.cpp's converter lays models out.

Promises: small and plain; what is written is held against the `gguf` library in the tests. Must not know: the reader
under test.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FORMS = {
    **{"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i")},
    **{"f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")},
}
# Numbers, values of a block and bytes of a block of the types that the tests write.
TYPES = {
    **{"F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "F64": (28, 1, 8)},
    **{"Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34)},
    **{"Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176)},
    **{"Q6_K": (14, 256, 210), "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "MXFP4": (39, 32, 17)},
    **{"NVFP4": (40, 64, 36), "IQ2_XS": (17, 256, 74)},
}


@dataclass(frozen=True)
class Typed:
    """A value that is to be stored in another type than the usual one of its Python type; a list: that of its items."""

    kind: str
    value: Any


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in the file; `shape` as torch has it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: bytes


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Any) -> bytes:
    """The type and the value."""
    if isinstance(value, Typed):
        number, form = _FORMS[value.kind]
        if isinstance(value.value, list):
            head = struct.pack("<IIQ", 9, number, len(value.value))
            return head + struct.pack(f"<{len(value.value)}{form}", *value.value)
        return struct.pack("<I" + form, number, value.value)
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        if value and isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        return value_bytes(Typed("f32" if value and isinstance(value[0], float) else "i32", value))
    kind = "bool" if isinstance(value, bool) else "f32" if isinstance(value, float) else "u32"
    return value_bytes(Typed(kind, value))


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Sequence[Stored] = (), *, version: int = 3, alignment: int = 32
) -> bytes:
    """A whole file."""
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    head += [text(key) + value_bytes(value) for key, value in metadata.items()]
    data: list[bytes] = []
    at = 0
    for tensor in tensors:
        head.append(text(tensor.name) + struct.pack("<I", len(tensor.shape)))
        head.append(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
        head.append(struct.pack("<IQ", TYPES[tensor.kind][0], at))
        padding = -len(tensor.data) % alignment
        data += [tensor.data, bytes(padding)]
        at += len(tensor.data) + padding
    header = b"".join(head)
    return header + bytes(-len(header) % alignment) + b"".join(data)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[Stored] = (), **how: int) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **how))
    return path


def write_shards(folder: Path, stem: str, metadata: Mapping[str, Any], parts: Sequence[Sequence[Stored]]) -> Path:
    """A model in several files; returns the first, which has all the metadata."""
    total = sum(map(len, parts))
    paths = [folder / f"{stem}-{number:05d}-of-{len(parts):05d}.gguf" for number in range(1, len(parts) + 1)]
    for number, (path, tensors) in enumerate(zip(paths, parts, strict=True)):
        split = {
            "split.no": Typed("u16", number),
            "split.count": Typed("u16", len(parts)),
            "split.tensors.count": Typed("i32", total),
        }
        write_gguf(path, {**(metadata if number == 0 else {}), **split}, tensors)
    return paths[0]

"""What lies where in an image of packed weights: its first bytes, the same in memory and in a file.

    magic, 16 bytes | length of the text, 8 | BLAKE2b-256 of the text, 32 | text: JSON | zeros up to HEADER_BYTES

Promises: a header that decodes is whole, of this version, and places everything inside the image; all of it begins at a
multiple of 64 bytes. Must not know: tensors, files, what a matrix is for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

HEADER_BYTES = 2 << 20
SECTION_BYTES = 8 << 20  # that one checksum is for
ALIGNMENT = 64
_MAGIC = b"quire packed 001"
_DIGEST_BYTES = 32
_TEXT_AT = len(_MAGIC) + 8 + _DIGEST_BYTES


class BadHeader(ValueError):
    """Not the header of an image of this version; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """All that is known of an image beside its bytes. Offsets count from its beginning."""

    key: str  # of what was packed, and into what
    num_bytes: int  # of the image, this header included
    tensors: dict[str, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)  # name: offset, bytes, shape
    facts: dict[str, dict[str, int]] = field(default_factory=dict)  # place of a matrix: as its kernel set tells them
    parts: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)  # place: name: offset, bytes
    checksums: tuple[int, ...] = ()  # of the sections behind the header; none: it was never meant for a file

    def encode(self) -> bytes:
        """HEADER_BYTES. Raises BadHeader if that is too few."""
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        if len(text) > HEADER_BYTES - _TEXT_AT:
            raise BadHeader(f"its list of contents takes {len(text)} bytes")
        digest = blake2b(text, digest_size=_DIGEST_BYTES).digest()
        return (_MAGIC + len(text).to_bytes(8, "little") + digest + text).ljust(HEADER_BYTES, b"\0")

    def sections(self) -> list[tuple[int, int]]:
        """The beginning and the end of each."""
        starts = range(HEADER_BYTES, self.num_bytes, SECTION_BYTES)
        return [(start, min(start + SECTION_BYTES, self.num_bytes)) for start in starts]


def decode_header(data: bytes) -> Header:
    """The header that `data` begins with. Raises BadHeader."""
    if len(data) < HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise BadHeader("it is not a file of packed weights, or one of another version")
    size = int.from_bytes(data[len(_MAGIC) : len(_MAGIC) + 8], "little")
    text = data[_TEXT_AT : _TEXT_AT + size]
    digest = data[len(_MAGIC) + 8 : _TEXT_AT]
    damaged = blake2b(text, digest_size=_DIGEST_BYTES).digest() != digest
    if damaged or size > HEADER_BYTES - _TEXT_AT or data[_TEXT_AT + size : HEADER_BYTES].strip(b"\0"):
        raise BadHeader("its list of contents is damaged")
    try:
        header = _from_plain(json.loads(text))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadHeader(f"its list of contents is not understood: {error!r}") from None
    for offset, size in _places(header):
        if offset < HEADER_BYTES or size <= 0 or offset + size > header.num_bytes or offset % ALIGNMENT:
            raise BadHeader(f"its list of contents names {size} bytes at {offset} of {header.num_bytes}")
    if header.checksums and len(header.checksums) != len(header.sections()):
        raise BadHeader(f"it has {len(header.checksums)} checksums for {len(header.sections())} sections")
    return header


def _from_plain(plain: dict[str, Any]) -> Header:
    return Header(
        key=str(plain["key"]),
        num_bytes=int(plain["num_bytes"]),
        tensors={
            name: (int(at), int(size), tuple(int(n) for n in shape))
            for name, (at, size, shape) in plain["tensors"].items()
        },
        facts={place: {name: int(n) for name, n in facts.items()} for place, facts in plain["facts"].items()},
        parts={
            place: {name: (int(at), int(size)) for name, (at, size) in parts.items()}
            for place, parts in plain["parts"].items()
        },
        checksums=tuple(int(sum_) for sum_ in plain["checksums"]),
    )


def _places(header: Header) -> list[tuple[int, int]]:
    """Offset and bytes of everything."""
    found = [place for parts in header.parts.values() for place in parts.values()]
    return found + [(offset, size) for offset, size, _ in header.tensors.values()]

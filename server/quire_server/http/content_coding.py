"""Decodes request bodies that come compressed (Content-Encoding), a bounded piece at a time.

Promises: no more is decoded than the body may have, however much a bomb would become; what is decoded counts as held
before it is passed on; the event loop has a turn between two pieces.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from starlette.types import Message, Receive

from quire_server.errors import BadRequest, UnsupportedMediaType
from quire_server.http.body_limits import BodyHold, BodyLimit

PIECE_BYTES = 64 << 10  # of content, decoded in well under a millisecond
WINDOW_BYTES = 8 << 20  # of a zstd frame, the most that senders may expect a server to take (RFC 9659)
MOST_MEMBERS = 1024  # gzip members, or zstd frames, of one body
_OTHER_NAMES = {"x-gzip": "gzip"}
_WBITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}  # HTTP's deflate is zlib's format
ACCEPTED = (*_WBITS, "zstd")


def coding_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The content coding of a body; None: it comes as it is. Raises UnsupportedMediaType, naming those that are taken.

    Of several codings, one on another, none is taken.
    """
    lines = [value.decode("latin-1").lower() for name, value in headers if name == b"content-encoding"]
    names = [name for line in lines for each in line.split(",") if (name := each.strip()) != "identity"]
    codings = [_OTHER_NAMES.get(name, name) for name in names]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in ACCEPTED:
        raise UnsupportedMediaType(
            f"A body may be compressed by one of {', '.join(ACCEPTED)}.",
            headers={"Connection": "close", "Accept-Encoding": ", ".join(ACCEPTED)},
        )
    return codings[0]


class DecodedBody:
    """Receives one request's body decoded; takes the place of the `receive` that brings it compressed."""

    def __init__(self, receive: Receive, coding: str, *, limit: BodyLimit, hold: BodyHold) -> None:
        """`limit`: of the content. `hold`: the body's share of the budget, which has counted what `receive` brings."""
        self._receive_coded = receive
        self._decoder = Decoder(coding)
        self._limit = limit
        self._hold = hold
        self._most_window = WINDOW_BYTES if coding == "zstd" else 0
        self._window = 0  # bytes of the decoder's window that are in use
        self._pieces: Iterator[bytes] = iter(())
        self._num_bytes = 0
        self._is_complete = False  # whether all of the body has arrived
        self._is_over = False

    async def receive(self) -> Message:
        """The next piece of the content, or what follows the body."""
        while not self._is_over:
            for piece in self._pieces:
                await asyncio.sleep(0)
                if piece:
                    self._count(len(piece))
                    return {"type": "http.request", "body": piece, "more_body": True}
            if self._is_complete:
                self._is_over = True
                self._decoder.finish()
                self._hold.grow(-self._window)
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive_coded()
            if message["type"] != "http.request":
                return message
            coded = message.get("body", b"")
            self._hold.grow(-len(coded))  # what it becomes is counted instead
            self._pieces = self._decoder.decode(coded)
            self._is_complete = not message.get("more_body", False)
        return await self._receive_coded()

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > self._limit.max_bytes:
            self._is_over = True
            self._hold.release()
            raise self._limit.too_large()
        before, self._window = self._window, min(self._num_bytes, self._most_window)
        self._hold.grow(num_bytes + self._window - before)


class _Member(Protocol):
    """The decoder of one gzip member, zlib stream or zstd frame."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Zlib:
    """zlib's decoder, which keeps the input that it has not decoded yet, as that of zstd does."""

    def __init__(self, wbits: int) -> None:
        self._inner = zlib.decompressobj(wbits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        self.needs_input = not self._inner.unconsumed_tail and len(piece) < max_length
        return piece


def _zstd() -> tuple[_Member, type[Exception]]:
    """A decoder of one frame, and its error."""
    # Imported when the first such body comes.
    if sys.version_info >= (3, 14):
        from compression import zstd  # noqa: PLC0415
    else:
        from backports import zstd  # noqa: PLC0415
    window = {int(zstd.DecompressionParameter.window_log_max): WINDOW_BYTES.bit_length() - 1}
    return zstd.ZstdDecompressor(options=window), zstd.ZstdError


class Decoder:
    """Decodes the content of one body from its parts."""

    def __init__(self, coding: str) -> None:
        """`coding`: one of `ACCEPTED`."""
        self._coding = coding
        self._num_members = 0
        self._is_empty = True
        self._error: type[Exception]
        self._next_member()

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yields the content of the body's next part in pieces, which may be empty. Raises BadRequest."""
        is_waiting = False  # whether the decoder has more to give
        while data or is_waiting:
            self._is_empty = False
            if self._member.eof:
                self._next_member()
            try:
                piece = self._member.decompress(data, PIECE_BYTES)
            except self._error as error:
                raise self._bad(f"is not in the format: {error}") from None
            data = self._member.unused_data if self._member.eof else b""
            is_waiting = not (self._member.eof or self._member.needs_input)
            yield piece

    def finish(self) -> None:
        """Raises BadRequest where the body has ended before its coding has."""
        if not (self._is_empty or self._member.eof):
            raise self._bad("ends too early.")

    def _next_member(self) -> None:
        self._num_members += 1
        if self._num_members > MOST_MEMBERS:
            raise self._bad(f"has more than {MOST_MEMBERS} members.")
        self._member: _Member
        if self._coding == "zstd":
            self._member, self._error = _zstd()
        else:
            self._member, self._error = _Zlib(_WBITS[self._coding]), zlib.error

    def _bad(self, what: str) -> BadRequest:
        return BadRequest(f"The body's Content-Encoding is {self._coding}, but it {what}", code="invalid_encoding")

"""A form with one file (multipart/form-data), read while it arrives: the file goes to where the caller keeps it.

Promises: memory for a few parts of the body at most; the file is written off the event loop; a form that is wrong is a
BadRequest.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from quire_server.errors import BadRequest, ClientGone, PayloadTooLarge, UnsupportedMediaType

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_PARTS = 16
MAX_FIELD_BYTES = 1 << 10
MAX_FILE_NAME = 255  # characters
_WRITTEN = 1 << 20  # bytes that are written at once


@dataclass(slots=True, kw_only=True)
class Form:
    """A form that has been read; `file_name` is None where it has no file."""

    fields: dict[str, str] = field(default_factory=dict)
    file_name: str | None = None
    num_bytes: int = 0  # of the file


async def read_form(
    request: Request, file_field: str, write: Callable[[bytes], Awaitable[None]], *, max_bytes: int
) -> Form:
    """Read the body of a request, and give the file of one field to `write`, piece by piece.

    Raises BadRequest, UnsupportedMediaType, PayloadTooLarge, ClientGone, and what `write` raises.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise UnsupportedMediaType("Send the file as a form: 'Content-Type: multipart/form-data; boundary=...'.")
    reader = _Reader(file_field, max_bytes)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        while not reader.is_complete:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            parser.write(message.get("body", b""))
            if len(reader.waiting) >= _WRITTEN:
                await write(reader.take())
            if not message.get("more_body", False):
                break
    except FormParserError as error:
        raise BadRequest(f"The form cannot be read: {error}", code="invalid_form") from None
    if not reader.is_complete:
        raise BadRequest("The form ends before its last boundary.", code="invalid_form")
    await write(reader.take())
    return reader.form


class _Reader:
    """The callbacks of the parser for one form."""

    def __init__(self, file_field: str, max_bytes: int) -> None:
        self.form = Form()
        self.waiting = bytearray()  # of the file, to be written
        self.is_complete = False
        self._file_field = file_field
        self._max_bytes = max_bytes
        self._num_parts = 0
        self._name = ""  # of the part that is read
        self._is_file = False
        self._value = bytearray()
        self._header, self._header_value = bytearray(), bytearray()
        self._disposition = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_value,
            "on_part_data": self._add,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def take(self) -> bytes:
        """The bytes of the file that wait to be written."""
        taken = bytes(self.waiting)
        self.waiting.clear()
        return taken

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadRequest(f"The form has more than {MAX_PARTS} parts.", code="invalid_form")
        self._disposition = b""
        self._value.clear()

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _begin_value(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == self._file_field
        if self._name in self.form.fields or (self._is_file and self.form.file_name is not None):
            raise BadRequest(f"The form has '{self._name[:64]}' twice.", param=self._name[:64], code="invalid_form")
        if self._is_file:
            name = options.get(b"filename", b"").decode("utf-8", "replace")
            self.form.file_name = "".join(c for c in name if c.isprintable())[:MAX_FILE_NAME] or "file"

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.form.num_bytes += end - start
            if self.form.num_bytes > self._max_bytes:
                raise PayloadTooLarge(self._max_bytes)
            self.waiting += data[start:end]
        elif len(self._value) + end - start > MAX_FIELD_BYTES:
            raise BadRequest(f"A field may have {MAX_FIELD_BYTES} bytes.", param=self._name[:64], code="invalid_form")
        else:
            self._value += data[start:end]

    def _end(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._value.decode("utf-8", "replace")

    def _complete(self) -> None:
        self.is_complete = True

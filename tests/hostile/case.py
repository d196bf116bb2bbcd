"""One hostile request: what is sent, what may come back, and how it is exchanged over a socket of its own.

Promises: bytes are made when they are sent, so that a thousand large cases take no memory; reading goes on while
sending, as the server may answer before it has read everything. Must not know: which cases there are, good errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

OK_OR_REFUSED = frozenset({200, 400})
REFUSED = frozenset({400})
PATIENCE = 15.0
MOST_BYTES = 1 << 26
_PIECE = 1 << 16

Parts = Iterable[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`kind` is what counts are printed by."""

    kind: str
    name: str
    path: str = "/"  # decides which envelope an error has
    parts: Callable[[], Parts]  # what is sent, piece by piece
    expected: frozenset[int] = REFUSED  # statuses; 0 is a connection that is closed without an answer
    pause: float = 0.0  # seconds between two pieces
    patience: float = PATIENCE  # seconds for the whole answer
    closes: bool = False  # nothing more may be answered on this connection
    secrets: tuple[str, ...] = ()  # what no error may repeat
    quotes: tuple[str, ...] = ()  # what it may, though it looks like the inside of a server
    check: Callable[[Answer], str | None] | None = None  # what is wrong with the answer, in words
    slow: bool = False  # takes seconds by its nature; not held to a time


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back."""

    status: int = 0  # 0: closed without an answer
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    more: bytes = b""  # what followed the first answer on the same connection
    seconds: float = 0.0
    hung: bool = False  # neither answered nor closed

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> object:
        return json.loads(self.body)


def request(
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    headers: Iterable[str] = (),
    content_type: str | None = "application/json",
    host: str = "localhost",
) -> bytes:
    """One whole request; `headers` are lines."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers]
    if body is not None:
        lines += [f"Content-Type: {content_type}"] if content_type is not None else []
        lines.append(f"Content-Length: {len(body)}")
    lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + (body or b"")


async def exchange(host: str, port: int, case: Case) -> Answer:
    """Send the case over a connection of its own; what came back."""
    started = time.perf_counter()
    answer = Answer()
    reader, writer = await asyncio.open_connection(host, port, limit=MOST_BYTES)
    sending = asyncio.create_task(_send(writer, case))
    try:
        async with asyncio.timeout(case.patience):
            await _read(reader, answer)
            if case.closes:
                answer.more = await reader.read(MOST_BYTES)
    except TimeoutError:
        answer.hung = True
    except (OSError, EOFError, ValueError, ssl.SSLError):
        pass  # closed in the middle: the status says how far it came
    finally:
        answer.seconds = time.perf_counter() - started
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await sending
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await writer.wait_closed()
    return answer


async def _send(writer: asyncio.StreamWriter, case: Case) -> None:
    with contextlib.suppress(OSError):
        for part in case.parts():
            for start in range(0, len(part), _PIECE):
                writer.write(part[start : start + _PIECE])
                await writer.drain()
            if case.pause:
                await asyncio.sleep(case.pause)


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    """The first answer; the status is set as soon as its head has come."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *lines = head.rstrip().split("\r\n")
    answer.headers = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
    answer.status = int(status.split(" ")[1])
    if answer.status < 200:
        await _read(reader, answer)
        return
    length = answer.header("content-length")
    if answer.header("transfer-encoding") == "chunked":
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readline()
        answer.body = b"".join(parts)
    elif length is not None:
        answer.body = await reader.readexactly(int(length))
    else:
        answer.body = await reader.read(MOST_BYTES)

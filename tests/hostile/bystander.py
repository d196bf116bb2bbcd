"""Other clients of a server: their streams, and who asks for /health/live, measured in a process of their own.

Promises: what it tells was measured here, so that whoever does the harm cannot disturb the measuring; it ends with its
standard input. Standard library only: it is started by its path. Must not know: what is done to the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

LIVE_EVERY = 0.05  # seconds between two questions
LOOK_EVERY = 0.02  # seconds: how late this process itself runs
AGAIN_AFTER = 0.05  # seconds, where a stream was refused or broken off
MOST_BYTES = 1 << 20


@dataclass(kw_only=True)
class Felt:
    """Since it was last told. Seconds and counts."""

    gap: float = 0.0  # the longest between two pieces of a stream, open ones included
    usual: float = 0.0  # the median of such gaps before anything was done
    live: float = 0.0  # the slowest answer of /health/live
    live_failures: int = 0  # answers other than 200, and none
    broken: int = 0  # streams that ended without their end
    changed: int = 0  # streams that said something else than the first time
    refused: int = 0  # streams that were not begun
    ended: int = 0  # streams that ended well
    late: float = 0.0  # how late this process itself was: noise of the machine


class Bystander:
    """`streams` greedy streams that begin again when they end, and one connection that asks for /health/live."""

    def __init__(self, *, host: str, port: int, headers: str, streams: int, tokens: int) -> None:
        self._address = (host, port)
        self._headers = headers
        self._streams = streams
        self._tokens = tokens
        self._felt = Felt()
        self._gaps: list[float] | None = []  # until the usual one is known
        self._usual = 0.0
        self._last: dict[int, float] = {}  # of each stream that has begun, when its last piece came
        self._asked: float | None = None  # since when /health/live has not answered
        self._golden: dict[int, str] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, quiet: float) -> None:
        """Start, and learn for so many seconds what is usual."""
        tasks = [self._live(), self._look(), *(self._follow(number) for number in range(self._streams))]
        self._tasks = [asyncio.create_task(task) for task in tasks]
        await asyncio.sleep(quiet)
        if self._streams and not self._gaps:
            raise RuntimeError("no stream has begun")
        self._usual = statistics.median(self._gaps) if self._gaps else 0.0
        self._gaps = None
        self._felt = Felt()

    def tell(self) -> Felt:
        """All since the last time."""
        now = time.perf_counter()
        felt, self._felt = self._felt, Felt()
        felt.usual = self._usual
        felt.gap = max([felt.gap, *(now - at for at in self._last.values())])
        if self._asked is not None:
            felt.live = max(felt.live, now - self._asked)
        return felt

    async def _follow(self, number: int) -> None:
        while True:
            try:
                await self._stream(number)
            except (OSError, EOFError, asyncio.LimitOverrunError):
                self._felt.broken += 1
                await asyncio.sleep(AGAIN_AFTER)
            finally:
                self._last.pop(number, None)

    async def _stream(self, number: int) -> None:
        body = json.dumps(
            {
                "prompt": f"{number + 1}, {number + 2}, {number + 3},",
                "max_tokens": self._tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        reader, writer = await asyncio.open_connection(*self._address, limit=MOST_BYTES)
        try:
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{self._headers}{head}\r\n{body}".encode()
            )
            status = await reader.readuntil(b"\r\n\r\n")
            if not status.startswith(b"HTTP/1.1 200"):
                self._felt.refused += 1
                await asyncio.sleep(AGAIN_AFTER)
                return
            await self._read(number, reader)
        finally:
            writer.close()

    async def _read(self, number: int, reader: asyncio.StreamReader) -> None:
        said, is_done = hashlib.sha256(), False
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue  # framing, empty lines, comments that keep the connection
            now = time.perf_counter()
            if number in self._last:
                self._gap(now - self._last[number])
            self._last[number] = now
            if line.startswith(b"data: [DONE]"):
                is_done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                break
            for choice in event["choices"]:
                said.update(choice["text"].encode())
        if not is_done:
            self._felt.broken += 1
            return
        self._felt.ended += 1
        if self._golden.setdefault(number, said.hexdigest()) != said.hexdigest():
            self._felt.changed += 1

    def _gap(self, seconds: float) -> None:
        if self._gaps is not None:
            self._gaps.append(seconds)
        self._felt.gap = max(self._felt.gap, seconds)

    async def _live(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection(*self._address)
            except OSError:
                self._felt.live_failures += 1
                await asyncio.sleep(LIVE_EVERY)
                continue
            try:
                while True:
                    self._asked = time.perf_counter()
                    writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
                    took, self._asked = time.perf_counter() - self._asked, None
                    self._felt.live = max(self._felt.live, took)
                    self._felt.live_failures += not head.startswith(b"http/1.1 200")
                    await asyncio.sleep(max(LIVE_EVERY - took, 0))
            except (OSError, EOFError):
                self._asked = None
                self._felt.live_failures += 1
            finally:
                writer.close()

    async def _look(self) -> None:
        while True:
            due = time.perf_counter() + LOOK_EVERY
            await asyncio.sleep(LOOK_EVERY)
            self._felt.late = max(self._felt.late, time.perf_counter() - due)


async def main() -> None:
    """A JSON object with the arguments on the first line of standard input; each further line asks what was felt."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    arguments = json.loads(await lines.readline())
    quiet = arguments.pop("quiet")
    bystander = Bystander(**arguments)
    await bystander.begin(quiet)
    print(json.dumps(asdict(bystander.tell())), flush=True)
    while await lines.readline():
        print(json.dumps(asdict(bystander.tell())), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

"""More bytes of bodies than there is room for: many that are held, and one that never ends.

Promises: what it holds is let go before it returns. Must not know: how the server counts.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from urllib.parse import urlsplit

import psutil

from e2e.served import Served
from hostile.row import Row
from hostile.rows.bodies_parsing import SIZE, check
from hostile.watch import Watch

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NUM_HELD = 120
MIB = 1 << 20


async def hold(server: Served) -> str:
    """The status of a body that lacks its last byte; "held" where there is none within a few seconds."""
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % SIZE)
        sending = asyncio.create_task(_send(writer))
        try:
            async with asyncio.timeout(8):
                return (await reader.readline()).decode().split()[1]
        except TimeoutError:
            return "held"
        except (ConnectionError, IndexError):
            return "reset"
        finally:
            sending.cancel()
    finally:
        writer.close()


async def _send(writer: asyncio.StreamWriter) -> None:
    left = SIZE - 1
    try:
        while left:
            writer.write(b" " * min(left, 1 << 16))
            left -= min(left, 1 << 16)
            await writer.drain()
    except ConnectionError:
        return


async def many(server: Served) -> str:
    async with Watch(server.url, pid=server.process.pid) as watch:
        process = psutil.Process(server.process.pid)
        before = peak = process.memory_info().rss
        holding = asyncio.gather(*(hold(server) for _ in range(NUM_HELD)))
        while not (await asyncio.wait({holding}, timeout=0.2))[0]:  # afterwards the clients have let go
            peak = max(peak, process.memory_info().rss)
        became = Counter(holding.result())
        held = await watch.seen()
        await asyncio.sleep(2)
        faults = await watch.canary()
        after = await watch.seen()
    said = f"{dict(became)}; memory {(peak - before) / MIB:+.0f} MiB while held, {after.grown / MIB:+.0f} MiB after"
    assert not faults, f"{said}; {faults}"
    assert became["held"] == 8, said  # those that the room for all bodies holds
    assert peak - before < 192 * MIB, said  # 64 MiB of bodies, and what connections read ahead
    return f"{said}; {held}"


async def endless(server: Served) -> str:
    address = urlsplit(server.url)
    async with Watch(server.url, pid=server.process.pid) as watch:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        sent, status, started = 0, "", time.monotonic()
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = asyncio.create_task(reader.readline())
        chunk = b"10000\r\n" + b" " * (1 << 16) + b"\r\n"
        try:
            while sent < 1 << 30 and not answer.done():
                writer.write(chunk)
                sent += 1 << 16
                await writer.drain()
        except ConnectionError:
            pass
        status = (await answer).decode().split()[1]
        seconds = time.monotonic() - started
        writer.close()
        faults = await watch.canary()
        seen = await watch.seen()
    said = f"{status} after {seconds * 1000:.0f} ms and {sent / MIB:.1f} MiB"
    assert not faults, f"{said}; {faults}"
    assert status == "413", said
    assert seconds <= 2, said
    # What lies in the sockets of both sides is not read.
    assert sent <= SIZE + 8 * MIB, said
    assert seen.grown < 32 * MIB, f"{said}; {seen}"
    return check(seen, said)


ROWS = [
    Row(
        name="bodies-held",
        what=f"{NUM_HELD} bodies of 8 MiB without their last byte",
        act=many,
        flags=("--max-body-bytes", "8MiB"),
    ),
    Row(name="bodies-endless", what="1 GB in chunks, without end", act=endless, flags=("--max-body-bytes", "8MiB")),
]

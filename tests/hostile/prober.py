"""Asks a server for /health/live as orchestrators do, each time on a new connection, and tells how long it took.

Promises: a question is asked every 25 ms whether or not those before it were answered, so that no wait is left out; it
is a process of its own, so that whoever does the harm cannot disturb the measuring. Standard library only: it is
started by its path. Must not know: what is done to the server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

EVERY = 0.025  # seconds between two questions
PATIENCE = 120.0  # seconds
QUESTION = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def ask(host: str, port: int) -> tuple[float, int]:
    """Seconds until the answer, and its status; 0 for none."""
    asked, status = time.perf_counter(), 0
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(QUESTION)
                status = int((await reader.readline()).split()[1])
            finally:
                writer.close()
    except (OSError, IndexError, ValueError):  # a timeout is an OSError
        pass
    return time.perf_counter() - asked, status


async def main(host: str, port: int) -> None:
    """Until standard input ends, then a JSON array of what `ask` returned."""
    ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    asked: list[asyncio.Task[tuple[float, int]]] = []
    while not ended.done():
        asked.append(asyncio.create_task(ask(host, port)))
        await asyncio.sleep(EVERY)
    print(json.dumps(await asyncio.gather(*asked)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))

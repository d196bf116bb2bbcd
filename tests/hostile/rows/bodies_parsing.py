"""Bodies of 8 MiB that are dear to read: brackets, keys, ids; with a key and without one.

Promises: what is sent is made before the watch begins. Must not know: how the server reads.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from e2e.served import Served
from hostile.row import Row
from hostile.watch import Seen, Watch

KEY = "0123456789abcdef"
BEARER = {"Authorization": f"Bearer {KEY}"}
SIZE = 8 << 20
LONGEST_STALL, LONGEST_GAP = 0.1, 0.25
FLAGS = ("--max-body-bytes", "8MiB", "--api-key", KEY)


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """As many items as fit into the size."""
    return before + item * ((SIZE - len(before) - len(after)) // len(item)) + after


def brackets() -> bytes:
    return filled(b'{"prompt":', b"[", b"}")


def groups() -> bytes:
    return filled(b'{"prompt":[', b"[" * 60 + b"]" * 60 + b",", b"1]}")


def empties() -> bytes:
    return filled(b'{"prompt":[', b"[],", b"1]}")


def keys() -> bytes:
    return b"{" + b",".join(b'"k%06d":1' % i for i in range(600_000)) + b',"prompt":"a"}'


def ids() -> bytes:
    return filled(b'{"max_tokens":1,"prompt":[', b"1,", b"1]}")


def tokens() -> bytes:
    return filled(b'{"tokens":[', b"1,", b"1]}")


def inputs() -> bytes:
    """A million ids in 2,048 lists, the last of which is none."""
    one = b"[" + b"1234,1," * 255 + b"1234,1]"
    return b'{"input":[' + b",".join([one] * 2047) + b",[-1]]}"


def escapes() -> bytes:
    return filled(b'{"prompt":"', b"\\n", b'","max_tokens":-1}')


def parts() -> bytes:
    message = b'{"role":"user","content":[' + b",".join([b'{"type":"text","text":"a"}'] * 200) + b"]}"
    return filled(b'{"messages":[', message + b",", message + b"]}")


async def post(server: Served, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, float]:
    """The status, and the seconds until it was there."""
    address = urlsplit(server.url)
    lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    started = time.monotonic()
    try:
        async with asyncio.timeout(120):
            writer.write(head.encode() + body)
            status = int((await reader.readline()).split()[1])
            return status, time.monotonic() - started
    finally:
        writer.close()


def check(seen: Seen, said: str) -> str:
    """What is said of it all. What the measuring process itself was late is not the server's."""
    told = f"{said}; {seen}"
    assert seen.stall - seen.late <= LONGEST_STALL, told
    assert seen.beyond - seen.late <= LONGEST_GAP, told
    return told


def row(name: str, what: str, path: str, make: object, *, headers: dict[str, str], status: int) -> Row:
    async def act(server: Served) -> str:
        body: bytes = make()  # type: ignore[operator]
        async with Watch(server.url, pid=server.process.pid, headers=BEARER) as watch:
            got, seconds = await post(server, path, body, headers)
            faults = await watch.canary()
            seen = await watch.seen()
        said = f"{got} after {seconds * 1000:.0f} ms"
        assert not faults, f"{said}; {faults}; {seen}"
        assert got == status, f"{said}; {seen}"
        return check(seen, said)

    return Row(name=f"bodies-{name}", what=what, act=act, flags=FLAGS)


ROWS = [
    *(
        row(f"{name}{end}", f"{what}, {whose}", path, make, headers=headers, status=with_key if headers else 401)
        for name, what, path, make, with_key in (
            ("brackets", "8 MiB of brackets", "/v1/completions", brackets, 400),
            ("groups", "8 MiB of nested groups", "/v1/completions", groups, 400),
            ("empties", "8 MiB of empty arrays", "/v1/completions", empties, 400),
            ("keys", "600,000 keys", "/v1/completions", keys, 400),
            ("ids", "4 million ids", "/v1/completions", ids, 400),
        )
        for end, whose, headers in (("", "with a key", BEARER), ("-keyless", "without a key", {}))
    ),
    row("tokens", "4 million ids to be shown as text", "/detokenize", tokens, headers=BEARER, status=400),
    row("inputs", "a million ids to be embedded", "/v1/embeddings", inputs, headers=BEARER, status=400),
    row("escapes", "8 MiB of escapes", "/v1/completions", escapes, headers=BEARER, status=400),
    row("parts", "8 MiB of messages with 200 parts", "/v1/chat/completions", parts, headers=BEARER, status=400),
]

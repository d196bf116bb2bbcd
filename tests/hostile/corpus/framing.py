"""Requests that are wrong on the wire: their framing, their size, how slow they are, and what is no HTTP at all.

Promises: what is wrong with a request is one thing; whatever it is, there is an answer or the connection is closed.
Must not know: routes beyond those that it sends to.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable, Iterator

from hostile.case import Answer, Case, Parts
from hostile.corpus.facts import MARK, Facts

REFUSED = frozenset({400})
OK = frozenset({200})
TOO_LARGE = frozenset({400, 413, 431})
_BODY = b'{"prompt":"a"}'
_LENGTH = b"Content-Length: 14\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
_IN_CHUNKS = b"e\r\n" + _BODY + b"\r\n0\r\n\r\n"
_SECOND = b"POST /detokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"


def cases(facts: Facts) -> Iterator[Case]:
    yield from _lengths(facts)
    yield from _chunks(facts)
    yield from _heads(facts)
    yield from _sizes(facts)
    yield from _encodings(facts)
    yield from _slow(facts)
    yield from _no_http()


def _post(facts: Facts, headers: bytes, body: bytes = b"", *, content_type: bytes = b"application/json") -> bytes:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + facts.authorization.encode() + b"\r\n"
    kind = b"Content-Type: " + content_type + b"\r\n" if content_type else b""
    return head + kind + headers + b"\r\n" + body


def _wire(
    kind: str,
    name: str,
    *parts: bytes,
    expected: frozenset[int],
    closes: bool = True,
    pause: float = 0.0,
    **more: object,
) -> Case:
    def sent() -> Parts:
        return parts

    return _made(kind, name, sent, expected=expected, closes=closes, pause=pause, **more)


def _made(kind: str, name: str, parts: Callable[[], Parts], **more: object) -> Case:
    return Case(kind=kind, name=name, path="/tokenize", parts=parts, secrets=(MARK,), **more)  # type: ignore[arg-type]


def _only_one(answer: Answer) -> str | None:
    return "a second answer on the same connection" if b"HTTP/1.1" in answer.more else None


def _lengths(facts: Facts) -> Iterator[Case]:
    """Where a request ends must not be a matter of opinion."""
    both = {
        "a length and chunks": _LENGTH + _CHUNKED,
        "chunks and a length": _CHUNKED + _LENGTH,
        "two lengths": _LENGTH + b"Content-Length: 15\r\n",
        "the same length twice": _LENGTH * 2,
        "a list of lengths": b"Content-Length: 14, 14\r\n",
        "a negative length": b"Content-Length: -14\r\n",
        "a signed length": b"Content-Length: +14\r\n",
        "a length in hexadecimal": b"Content-Length: 0xe\r\n",
        "a length with an underscore": b"Content-Length: 1_4\r\n",
        "a length with a point": b"Content-Length: 14.0\r\n",
        "no length in its header": b"Content-Length: \r\n",
        "a length in Arabic digits": "Content-Length: ١٤\r\n".encode(),
        "a length of 2^64": b"Content-Length: 18446744073709551616\r\n",
        "a length of 5,000 digits": b"Content-Length: " + b"1" * 5000 + b"\r\n",
        "gzip as transfer encoding": b"Transfer-Encoding: gzip\r\n",
        "gzip after chunked": b"Transfer-Encoding: chunked, gzip\r\n",
        "gzip before chunked": b"Transfer-Encoding: gzip, chunked\r\n",
        "an unknown transfer encoding": b"Transfer-Encoding: xchunked\r\n",
        "a quoted transfer encoding": b'Transfer-Encoding: "chunked"\r\n',
        "a vertical tab before chunked": b"Transfer-Encoding:\x0bchunked\r\n" + _LENGTH,
        "a space before the colon": b"Transfer-Encoding : chunked\r\n" + _LENGTH,
        "a folded header": b"Transfer-Encoding:\r\n chunked\r\n" + _LENGTH,
    }
    for name, headers in both.items():
        for body, what in ((_BODY + _SECOND, "plain"), (_IN_CHUNKS + _SECOND, "in chunks")):
            yield _wire("framing", f"{name}, {what}", _post(facts, headers, body), expected=REFUSED, check=_only_one)
    yield _wire("framing", "no length at all", _post(facts, b"", b""), expected=REFUSED | {411}, closes=False)
    late = _post(facts, b"Content-Length: 100\r\n", _BODY)
    yield _wire("framing", "less than was announced", late, expected=frozenset({400, 408, 0}), slow=True, patience=40.0)
    more = _post(facts, _LENGTH + b"Connection: close\r\n", _BODY + _SECOND)
    yield _wire("framing", "more than was announced", more, expected=OK | REFUSED, check=_only_one)


def _chunks(facts: Facts) -> Iterator[Case]:
    wrong = {
        "letters as a size": b"zz\r\n" + _BODY,
        "a negative size": b"-e\r\n" + _BODY,
        "a signed size": b"+e\r\n" + _BODY,
        "0x before the size": b"0xe\r\n" + _BODY,
        "a size of 2^64": b"10000000000000000\r\n" + _BODY,
        "a size of 5,000 digits": b"f" * 5000 + b"\r\n" + _BODY,
        "no size": b"\r\n" + _BODY,
        "a NUL in the size": b"e\x00\r\n" + _BODY,
        "a chunk longer than its size": b"3\r\n" + _BODY + b"\r\n0\r\n\r\n",
        "no end of the line after a chunk": b"e\r\n" + _BODY + b"0\r\n\r\n",
        "an extension of 100 KB": b"e;" + b"a" * 100_000 + b"\r\n" + _BODY + b"\r\n0\r\n\r\n",
    }
    for name, body in wrong.items():
        allowed = TOO_LARGE | OK if name.startswith("an extension") else REFUSED
        closed = _post(facts, _CHUNKED + b"Connection: close\r\n", body)
        yield _wire("framing", name, closed, expected=allowed | {0} if "extension" in name else allowed)
    for name, body in {
        "an extension": b'e;a="b"\r\n' + _BODY + b"\r\n0\r\n\r\n",
        "trailers": b"e\r\n" + _BODY + b"\r\n0\r\nContent-Length: 5\r\nAuthorization: Bearer x\r\n\r\n",
        "leading zeros": b"0000000e\r\n" + _BODY + b"\r\n0\r\n\r\n",
    }.items():
        yield _wire("framing", name, _post(facts, _CHUNKED + b"Connection: close\r\n", body), expected=OK | REFUSED)
    endless = _post(facts, _CHUNKED, b"e\r\n" + _BODY + b"\r\n0\r\n" + b"A: " + b"a" * 3_000_000)
    yield _wire("framing", "endless trailers", endless, expected=TOO_LARGE | {0, 200, 408}, slow=True)

    def million() -> Parts:
        yield _post(facts, _CHUNKED + b"Connection: close\r\n")
        for byte in b'{"prompt":"':
            yield b"1\r\n%c\r\n" % byte
        for _ in range(100):
            yield b"1\r\na\r\n" * 10_000
        yield b'1\r\n"\r\n1\r\n}\r\n0\r\n\r\n'

    yield _made(
        "sizes", "a million chunks of a byte", million, expected=TOO_LARGE | OK, closes=True, slow=True, patience=60.0
    )


def _heads(facts: Facts) -> Iterator[Case]:
    start = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + facts.authorization.encode() + b"\r\n"
    end = b"Connection: close\r\n\r\n"
    for name, line in {
        "a header without a colon": b"nonsense\r\n",
        "a header without a name": b": a\r\n",
        "a space before a header": b" a: b\r\n",
        "a space in a header's name": b"a b: c\r\n",
        "a NUL in a header's name": b"a\x00b: c\r\n",
        "a NUL in a header": b"a: b\x00c\r\n",
        "a bell in a header": b"a: b\x07c\r\n",
        "a bare CR in a header": b"a: b\rc: d\r\n",
        "letters beyond ASCII in a name": "ä: b\r\n".encode(),
    }.items():
        yield _wire(
            "heads", name, start + line + end, expected=REFUSED | OK if name == "a bell in a header" else REFUSED
        )
    for name, line in {
        "bytes beyond ASCII": b"a: \xff\xfe\x80\r\n",
        "bare LF": b"a: b\n",
        "Expect: 100-continue": b"Expect: 100-continue\r\n",
        "Expect: nonsense": b"Expect: nonsense\r\n",
        "an upgrade to h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        "an upgrade to websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
        "Range": b"Range: bytes=0-," + b"5-6," * 2000 + b"\r\n",
        "X-HTTP-Method-Override": b"X-HTTP-Method-Override: DELETE\r\n",
        "X-Original-URL": b"X-Original-URL: /admin\r\n",
        "X-Forwarded-For of 10 KB": b"X-Forwarded-For: " + b"1.1.1.1, " * 1100 + b"\r\n",
        "Accept-Encoding: gzip": b"Accept-Encoding: gzip, br, zstd, *;q=0\r\n",
    }.items():
        allowed = OK | {400, 404, 416, 417, 426, 501}
        yield _wire("heads", name, start + line + end, expected=allowed, check=_only_one)
    for name, line in {
        "HTTP/0.9": b"GET /v1/models\r\n\r\n",
        "HTTP/9.9": b"GET /v1/models HTTP/9.9\r\nHost: a\r\n\r\n",
        "HTTP/1.10": b"GET /v1/models HTTP/1.10\r\nHost: a\r\n\r\n",
        "http/1.1": b"GET /v1/models http/1.1\r\nHost: a\r\n\r\n",
        "HTTP/2 with prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 9,
        "two spaces": b"GET  /v1/models  HTTP/1.1\r\nHost: a\r\n\r\n",
        "a tab for a space": b"GET\t/v1/models\tHTTP/1.1\r\nHost: a\r\n\r\n",
        "no target": b"GET HTTP/1.1\r\nHost: a\r\n\r\n",
        "no method": b"/v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
        "only an end of a line": b"\r\n\r\n\r\n\r\n",
    }.items():
        # Without a key: 401 is as good as 400 where a parser is lenient, an answer with data is not.
        yield _wire("heads", name, line, expected=frozenset({400, 401, 404, 405, 505, 0}), closes=False, slow=True)


def _sizes(facts: Facts) -> Iterator[Case]:
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    for name, sent in {
        "a header of 40 KB": get + b"A: " + b"a" * 40_000 + b"\r\n\r\n",
        "a header's name of 40 KB": get + b"a" * 40_000 + b": a\r\n\r\n",
        "300 headers": get + b"A: a\r\n" * 300 + b"\r\n",
        "3,000 headers without a value": get + b"A:\r\n" * 3000 + b"\r\n",
        "an endless header": get + b"A: " + b"a" * 3_000_000,
        "an endless path": b"GET /" + b"a" * 3_000_000,
        "an endless method": b"G" * 3_000_000,
        "a path of 60 KB": b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        "a cookie of 60 KB": get + b"Cookie: " + b"a=b; " * 12_000 + b"\r\n\r\n",
    }.items():
        yield _wire("sizes", name, sent, expected=frozenset({400, 414, 431}))
    limit = facts.max_body_bytes
    declared = _post(facts, b"Content-Length: %d\r\n" % (limit + 1), b"{")
    yield _wire("sizes", "a body declared over the limit", declared, expected=frozenset({413}))
    for size, name in ((10**12, "a terabyte"), (2**62, "2^62 bytes")):
        sent = _post(facts, b"Content-Length: %d\r\n" % size, b"{")
        yield _wire("sizes", f"{name} announced", sent, expected=frozenset({413, 400}))

    def endless() -> Parts:
        yield _post(facts, _CHUNKED)
        part = b"10000\r\n" + b" " * 65536 + b"\r\n"
        for _ in range(1 << 14):  # a gigabyte, if it were taken
            yield part

    yield _made("sizes", "a body without end", endless, expected=frozenset({413}), closes=False)

    def gigabyte() -> Parts:
        yield _post(facts, b"Content-Length: %d\r\n" % limit, b'{"prompt":"')
        for _ in range(limit // 65536):
            yield b"a" * 65536

    yield _made(
        "sizes", "a text of all that is allowed", gigabyte, expected=frozenset({400, 413, 408, 200}), closes=False
    )


def _encodings(facts: Facts) -> Iterator[Case]:
    bomb = gzip.compress(b"0" * (8 << 20))
    for name in ("gzip", "x-gzip", "deflate", "br", "zstd", "gzip, gzip", "x"):
        headers = b"Content-Encoding: %b\r\nContent-Length: %d\r\n" % (name.encode(), len(bomb))
        status = {"gzip": 413, "x-gzip": 413, "deflate": 400, "zstd": 400}.get(name, 415)
        sent = _post(facts, headers, bomb)
        yield _wire("encodings", f"a bomb of gzip in {name}", sent, expected=frozenset({status}), closes=status != 400)
    short = b"Content-Encoding: gzip\r\nContent-Length: 100\r\n"
    yield _wire(
        "encodings", "a part of a bomb", _post(facts, short, bomb[:100]), expected=frozenset({400}), closes=False
    )
    members = gzip.compress(b"") * 2000
    many = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n" % len(members)
    yield _wire("encodings", "2,000 empty bodies", _post(facts, many, members), expected=frozenset({400}), closes=False)
    for kind in (
        *("", "text/plain", "text/html", "multipart/form-data; boundary=a", "application/x-www-form-urlencoded"),
        *("application/json; charset=utf-16", "application/json; charset=latin-1", "application/octet-stream"),
        *("application/pickle", "a" * 5000, "application/json, text/plain", "*/*", "application/jsonx"),
    ):
        sent = _post(facts, _LENGTH, _BODY, content_type=kind.encode())
        yield _wire("encodings", f"the type {kind[:40]!r}", sent, expected=frozenset({415}), closes=False)


def _slow(facts: Facts) -> Iterator[Case]:
    patience = facts.header_timeout + 15
    late = {"slow": True, "patience": patience, "closes": True}
    drip = [b"GET /health HTTP/1.1\r\n", *[b"A: a\r\n"] * 60]
    yield _wire("slow", "silence", expected=frozenset({0, 408}), **late)
    yield _wire("slow", "half a line", b"GET /hea", expected=frozenset({408, 0}), **late)
    yield _wire("slow", "a head that drips", *drip, expected=frozenset({408}), pause=0.2, **late)
    yield _wire("slow", "letters that drip", *[b"G"] * 60, expected=frozenset({408, 400, 0}), pause=0.2, **late)


def _no_http() -> Iterator[Case]:
    dice = random.Random(17)
    for name, sent in {
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(508),
        "SSH": b"SSH-2.0-OpenSSH_9.9\r\n\r\n",
        "Redis": b"*1\r\n$4\r\nPING\r\n\r\n",
        "SMTP": b"EHLO localhost\r\nMAIL FROM:<a@b>\r\n\r\n",
        "zeros": bytes(70_000),
        "a PROXY line": b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "msgpack": b"\x82\xa6prompt\xa1a\xa5model\xa1b\r\n\r\n",
        "a pickle": b"\x80\x04cposix\nsystem\n(S'true'\ntR.\r\n\r\n",
        **{f"dice {i}": dice.randbytes(dice.choice((10, 100, 5000, 80_000))) + b"\r\n\r\n" for i in range(20)},
    }.items():
        yield _wire("no HTTP", name, sent, expected=frozenset({400, 431, 0, 408}), slow=True)

"""Request bodies that come compressed: they mean the same, and bombs are refused before they go off."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator

import httpx
import pytest

from quire_server.errors import BadRequest
from quire_server.http.content_coding import MOST_MEMBERS, PIECE_BYTES, WINDOW_BYTES, Decoder
from support.covering import few
from support.fakes import connect, listening, make_app, make_state

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.anyio

LIMIT = 1 << 20
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}
BASIC = ["gzip", "deflate", "zstd"]


def head(coding: str) -> dict[str, str]:
    return {"content-type": "application/json", "content-encoding": coding}


def of_length(length: int) -> bytes:
    """A body for /tokenize, with one token a byte of its text."""
    frame = json.dumps({"prompt": ""})
    return frame.replace('""', f'"{"x" * (length - len(frame))}"').encode()


async def pieces_of(raw: bytes, size: int):  # type: ignore[no-untyped-def]
    for start in range(0, len(raw), size):
        yield raw[start : start + size]


@pytest.mark.parametrize("coding", few([*COMPRESS, "GZIP", "identity, gzip"], *BASIC, "identity, gzip"))
async def test_compressed_bodies_mean_the_same(coding: str) -> None:
    raw = json.dumps({"prompt": "hé" * 40_000}, ensure_ascii=False).encode()
    coded = COMPRESS[coding.lower().rpartition(" ")[2]](raw)
    async with listening(make_app(body_timeout=60)) as server, httpx.AsyncClient(base_url=server.address) as client:
        direct = await client.post("/tokenize", json={"prompt": "hé" * 40_000})
        for content in (coded, pieces_of(coded, 7)):
            reply = await client.post("/tokenize", content=content, headers=head(coding))
            assert (reply.status_code, reply.json()["count"]) == (200, direct.json()["count"])


@pytest.mark.parametrize("coding", few(BASIC, "gzip"))
async def test_limits_hold_for_what_a_body_becomes(coding: str) -> None:
    state = make_state(max_body_bytes=LIMIT, max_model_len=2 * LIMIT)
    held: list[int] = []
    count, state.metrics.body_bytes = (
        state.metrics.body_bytes,
        lambda held_now: (held.append(held_now), count(held_now)),
    )
    async with connect(make_app(state)) as client:
        for length, status in ((LIMIT, 200), (LIMIT + 1, 413), (64 * LIMIT, 413)):
            coded = COMPRESS[coding](of_length(length))
            assert len(coded) < LIMIT // 8
            reply = await client.post("/tokenize", content=coded, headers=head(coding))
            assert reply.status_code == status, reply.text[:200]
            if status == 413:
                assert reply.json()["error"]["code"] == "payload_too_large"
    window = LIMIT if coding == "zstd" else 0
    assert LIMIT <= max(held) - window <= LIMIT + PIECE_BYTES
    assert held[-1] == 0


@pytest.mark.parametrize("coding", BASIC)
@pytest.mark.parametrize(
    "harm", [lambda raw: raw[:-9], lambda raw: b"{}" + raw, lambda raw: raw + b"{}", lambda _: b"{}"]
)
async def test_damaged_bodies_are_400(coding: str, harm: Callable[[bytes], bytes]) -> None:
    raw = COMPRESS[coding](bytes(range(256)) * 8)
    async with connect(make_app()) as client:
        reply = await client.post("/tokenize", content=harm(raw), headers=head(coding))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_encoding")


@pytest.mark.parametrize("coding", ["br", "gzip, zstd", "zstd;q=1", "x"])
async def test_other_codings_are_415_and_told_which_are_taken(coding: str) -> None:
    async with connect(make_app()) as client:
        reply = await client.post("/tokenize", content=b"{}", headers=head(coding))
        assert (reply.status_code, reply.headers["accept-encoding"]) == (415, "gzip, deflate, zstd")
        assert (await client.post("/tokenize", content=b'{"prompt":"a"}', headers=head("identity"))).status_code == 200


def decoded(decoder: Decoder, parts: Iterator[bytes]) -> bytes:
    found = b"".join(piece for part in parts for piece in decoder.decode(part))
    decoder.finish()
    return found


@pytest.mark.parametrize("coding", BASIC)
def test_a_piece_is_bounded_whatever_it_comes_from(coding: str) -> None:
    coded = COMPRESS[coding](bytes(16 << 20))
    sizes = [len(piece) for piece in Decoder(coding).decode(coded)]
    assert (sum(sizes), max(sizes)) == (16 << 20, PIECE_BYTES)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_members_follow_each_other(coding: str) -> None:
    compress = COMPRESS[coding]
    coded = compress(b"a" * 70_000) + compress(b"") + compress(b"b")
    for size in (1, 13, len(coded)):
        parts = (coded[at : at + size] for at in range(0, len(coded), size))
        assert decoded(Decoder(coding), parts) == b"a" * 70_000 + b"b"
    with pytest.raises(BadRequest, match="members"):
        decoded(Decoder(coding), iter([compress(b"") * (MOST_MEMBERS + 1)]))


def test_a_window_beyond_the_usual_is_refused() -> None:
    log = zstd.CompressionParameter.window_log
    for more, fits in ((0, True), (1, False)):
        compressor = zstd.ZstdCompressor(options={log: WINDOW_BYTES.bit_length() - 1 + more})
        coded = compressor.compress(b"a" * 1000) + compressor.flush()
        if fits:
            assert decoded(Decoder("zstd"), iter([coded])) == b"a" * 1000
        else:
            with pytest.raises(BadRequest, match="memory"):
                decoded(Decoder("zstd"), iter([coded]))


def test_a_body_of_nothing_is_no_body() -> None:
    for coding in BASIC:
        assert decoded(Decoder(coding), iter([b"", b""])) == b""

"""HTTPS: what the socket speaks, whom it asks for certificates, and files that cannot be used."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx
import pytest

from quire_engine.contract.errors import ConfigError
from quire_server.commands import health
from quire_server.http.tls import tls_context
from quire_server.settings import Settings
from support.certificates import Certificates, make_certificates
from support.fakes import MODEL, exchange, listening, make_app

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def trusting(certificates: Certificates, *, with_client: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificates.authority))
    if with_client:
        context.load_cert_chain(certificates.client, certificates.client_key)
    return context


async def test_the_socket_speaks_tls_and_nothing_else(certificates: Certificates) -> None:
    app = make_app(ssl_certfile=certificates.server, ssl_keyfile=certificates.server_key)
    async with listening(app) as server:
        assert server.address == f"https://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(verify=trusting(certificates), base_url=server.address) as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
            body = {"model": MODEL, "prompt": "a", "max_tokens": 3, "stream": True}
            streamed = await client.post("/v1/completions", json=body)
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert (await client.get("/nothing")).status_code == 404
        async with httpx.AsyncClient() as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get(f"{server.address}/health")
        assert server.port is not None
        assert b"200 OK" not in await exchange(server.port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")


async def test_what_does_not_parse_is_answered_within_tls(certificates: Certificates) -> None:
    app = make_app(ssl_certfile=certificates.server, ssl_keyfile=certificates.server_key)
    async with listening(app) as server:
        import asyncio

        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting(certificates))
        writer.write(b"nonsense\r\n\r\n")
        raw = await asyncio.wait_for(reader.read(), 300)
        writer.close()
    assert raw.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_http"' in raw


async def test_clients_need_a_certificate_where_it_is_required(certificates: Certificates) -> None:
    app = make_app(
        ssl_certfile=certificates.server,
        ssl_keyfile=certificates.server_key,
        ssl_ca_certs=certificates.authority,
        ssl_cert_reqs=2,
    )
    async with listening(app) as server:
        async with httpx.AsyncClient(verify=trusting(certificates, with_client=True)) as client:
            assert (await client.get(f"{server.address}/health")).status_code == 200
        async with httpx.AsyncClient(verify=trusting(certificates)) as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{server.address}/health")


async def test_the_health_check_follows(certificates: Certificates) -> None:
    """`quire health` finds a port, not what is spoken there."""
    import asyncio

    app = make_app(ssl_certfile=certificates.server, ssl_keyfile=certificates.server_key)
    async with listening(app) as server:
        for scheme in ("http", "https"):
            url = f"{scheme}://127.0.0.1:{server.port}"
            assert await asyncio.to_thread(health.run, ["--url", url, "--timeout", "5"]) == (scheme == "http")
        found = await asyncio.to_thread(health.trouble_at, f"http://127.0.0.1:{server.port}", 5.0)
        assert found == ""


def test_an_encrypted_key(certificates: Certificates) -> None:
    given = {"ssl_certfile": certificates.server, "ssl_keyfile": certificates.locked_key}
    assert tls_context(Settings(**given, ssl_keyfile_password="sesame")) is not None
    for password in ({}, {"ssl_keyfile_password": "wrong"}):
        with pytest.raises(ConfigError, match="--ssl-keyfile-password") as caught:
            tls_context(Settings(**given, **password))
        assert "wrong" not in str(caught.value)


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls_context(Settings()) is None


def test_files_that_cannot_be_used_are_one_line(certificates: Certificates, tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    cases = [
        ({"ssl_certfile": text}, "--ssl-certfile"),
        ({"ssl_certfile": certificates.server}, "the private key must be in it too"),
        ({"ssl_certfile": certificates.server, "ssl_keyfile": certificates.client_key}, "another certificate"),
        ({"ssl_certfile": certificates.server, "ssl_keyfile": text}, "--ssl-keyfile"),
    ]
    for given, words in cases:
        with pytest.raises(ConfigError) as caught:
            tls_context(Settings(**given))
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--ssl-ca-certs"):
        tls_context(Settings(ssl_certfile=certificates.server, ssl_keyfile=certificates.server_key, ssl_ca_certs=text))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ssl_certfile": Path("/nowhere.pem")}, "--ssl-certfile /nowhere.pem: there is no such file"),
        ({"ssl_keyfile": Path(__file__)}, "need --ssl-certfile"),
        ({"ssl_certfile": Path(__file__), "ssl_cert_reqs": 2}, "needs --ssl-ca-certs"),
    ],
)
def test_impossible_combinations(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**given)

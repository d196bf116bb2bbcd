"""POST /admin/reload: keys, tenants and certificates change under requests that run; a wrong file changes nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml

from quire_server.http.credentials import Credentials
from quire_server.http.tls import expiry
from quire_server.programs.launch import Stop
from quire_server.programs.serving import _reloads
from quire_server.settings import Settings
from support.certificates import Certificates, make_certificates
from support.events import until
from support.fake_engine import FakeEngine
from support.fakes import connect, listening, make_app, make_state

pytestmark = pytest.mark.anyio

OPERATOR = {"authorization": "Bearer operator-key"}
BODY = {"prompt": "hello", "temperature": 0, "max_tokens": 4}
NONE = {"added": 0, "removed": 0}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str, **limits: object) -> dict[str, object]:
    return {"name": name, "key_sha256": digest(key), **limits}


def write_tenants(path: Path, *entries: dict[str, object], **more: object) -> None:
    path.write_text(yaml.safe_dump({"tenants": list(entries), **more}))


@asynccontextmanager
async def served(engine: FakeEngine | None = None, **settings: object) -> AsyncIterator[httpx.AsyncClient]:
    settings.setdefault("admin_api_key", ("operator-key",))
    async with connect(make_app(make_state(engine=engine, **settings))) as client:
        yield client


async def reload(client: httpx.AsyncClient, status: int = 200, **headers: str) -> dict:
    reply = await client.post("/admin/reload", headers=OPERATOR | headers)
    assert reply.status_code == status, reply.text
    return reply.json()


async def status(client: httpx.AsyncClient, key: str) -> int:
    return (await client.post("/v1/completions", json=BODY, headers={"x-api-key": key})).status_code


async def test_a_key_is_refused_at_its_next_request_and_its_stream_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice=key-of-alice\nbob=key-of-bob1\n")
    engine = FakeEngine()
    engine.hold()
    async with served(engine, api_key=("from-a-flag", f"@{file}")) as client:
        headers = {"x-api-key": "key-of-alice"}
        running = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": True}, headers=headers))
        await until(lambda: bool(engine.live))
        file.write_text("bob=key-of-bob1\ncarol=key-of-carol\ndave=key-of-dave\n")
        assert (await reload(client))["keys"] == {"added": 2, "removed": 1}
        assert await status(client, "key-of-alice") == 401
        engine.release()
        stream = await running
        assert stream.status_code == 200
        assert stream.text.endswith("data: [DONE]\n\n")
        assert [await status(client, f"key-of-{name}") for name in ("bob1", "carol", "dave")] == [200] * 3
        assert await status(client, "from-a-flag") == 200
        assert await reload(client) == {
            **{"keys": NONE, "admin_keys": NONE, "tenants": NONE | {"changed": 0}},
            "certificate_expires": None,
        }


async def test_admin_keys_change_too(tmp_path: Path) -> None:
    file = tmp_path / "admins"
    file.write_text("first-operator\n")
    async with served(admin_api_key=(f"@{file}",)) as client:
        file.write_text("second-operator\n")
        told = await reload(client, authorization="Bearer first-operator")
        assert told["admin_keys"] == {"added": 1, "removed": 1}
        await reload(client, 401, authorization="Bearer first-operator")
        await reload(client, authorization="Bearer second-operator")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("keys", None, "--api-key @{}: cannot be read: No such file"),
        ("keys", "# nobody\n", "--api-key @{}: there is no key in it"),
        ("keys", "a=short\n", "--api-key @{}: line 1: an API key is written NAME=KEY with less than 8"),
        ("tenants", "tenants: [", "--tenants {}: not YAML"),
        ("tenants", "tenants: [{name: lab}]", "tenant 1 ('lab'): key_sha256: Field required"),
        ("tenants", None, "--tenants {}: cannot be read"),
    ],
)
async def test_a_wrong_file_changes_nothing(
    tmp_path: Path, name: str, text: str | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = {each: tmp_path / each for each in ("keys", "tenants")}
    files["keys"].write_text("an-old-key\n")
    write_tenants(files["tenants"], entry("lab", "old-key-of-lab"))
    async with served(api_key=(f"@{files['keys']}",), tenants=files["tenants"]) as client:
        files["keys"].write_text("a-new-key\n")
        write_tenants(files["tenants"], entry("lab", "new-key-of-lab"))
        if text is None:
            files[name].unlink()
        else:
            files[name].write_text(text)
        error = (await reload(client, 400))["error"]
        assert (error["code"], error["type"]) == ("reload_refused", "invalid_request_error")
        assert "Nothing has changed: " in error["message"]
        assert words.format(files[name]) in error["message"]
        assert str(files[name]) in error["message"]
        lines = [each.getMessage() for each in caplog.records if each.name == "quire.keys"]
        assert len(lines) == 1
        assert str(files[name]) in lines[0]
        assert [await status(client, each) for each in ("an-old-key", "old-key-of-lab")] == [200, 200]
        assert [await status(client, each) for each in ("a-new-key", "new-key-of-lab")] == [401, 401]


async def test_tenants_get_other_limits_and_unchanged_rates_keep_their_levels(tmp_path: Path) -> None:
    file, engine = tmp_path / "tenants", FakeEngine()
    write_tenants(
        file,
        entry("acme", "key-of-acme", requests_per_minute=2),
        entry("lab", "key-of-lab1", requests_per_minute=1),
        entry("gone", "key-of-gone"),
    )
    async with served(engine, tenants=file) as client:
        assert [await status(client, key) for key in ("key-of-acme", "key-of-lab1", "key-of-gone")] == [200] * 3
        write_tenants(
            file,
            entry("acme", "key-of-acme", requests_per_minute=2, weight=3, max_running=5),
            entry("lab", "key-of-lab1", requests_per_minute=2),
            entry("new", "key-of-new1", requests_per_minute=1),
        )
        told = await reload(client)
        assert told["tenants"] == {"added": 1, "removed": 1, "changed": 2}
        assert told["keys"] == {"added": 1, "removed": 1}
        assert [await status(client, "key-of-acme") for _ in range(2)] == [200, 429], "one of two a minute was used"
        assert [await status(client, "key-of-lab1") for _ in range(3)] == [200, 200, 429]
        assert [await status(client, "key-of-new1") for _ in range(2)] == [200, 429]
        assert await status(client, "key-of-gone") == 401
        metrics = (await client.get("/metrics")).text
    assert [(each.weight, each.max_running) for each in engine.submitted if each.tenant == "acme"] == [(1, 0), (3, 5)]
    assert 'quire_tenant_rejected_total{model_name="fake",reason="tenant_queue",tenant="new"} 0.0' in metrics


async def test_a_tenant_that_comes_back_has_what_it_left_running(tmp_path: Path) -> None:
    file, engine = tmp_path / "tenants", FakeEngine()
    acme, other = entry("acme", "key-of-acme", max_queued=1), entry("other", "key-of-other")
    write_tenants(file, acme, other)
    engine.hold()
    async with served(engine, tenants=file) as client:
        running = asyncio.create_task(status(client, "key-of-acme"))
        await until(lambda: bool(engine.live))
        write_tenants(file, other)
        await reload(client)
        assert await status(client, "key-of-acme") == 401
        write_tenants(file, acme, other)
        await reload(client)
        assert await status(client, "key-of-acme") == 429, "the request from before still waits"
        engine.release()
        assert await running == 200
        assert await status(client, "key-of-acme") == 200


async def test_another_usage_file_needs_a_start(tmp_path: Path) -> None:
    file = tmp_path / "tenants"
    write_tenants(file, entry("acme", "key-of-acme"))
    async with served(tenants=file) as client:
        write_tenants(file, entry("acme", "key-of-acme"), usage_file="usage.json")
        assert "takes effect at a start only" in (await reload(client, 400))["error"]["message"]


async def test_reloads_at_once_end_with_the_latest_files(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a-first-key\n")
    async with served(api_key=(f"@{file}",)) as client:
        asked = []
        for number in range(8):
            new = tmp_path / "new"
            new.write_text(f"key-number-{number}\n")
            new.replace(file)  # as operators do, so that no reload finds half of it
            asked.append(asyncio.create_task(reload(client)))
            await asyncio.sleep(0)
        assert len(await asyncio.gather(*asked)) == 8
        assert [await status(client, f"key-number-{number}") for number in (0, 7)] == [401, 200]


async def test_sighup_reloads_and_a_terminal_that_was_closed_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="quire.audit")
    file = tmp_path / "keys"
    file.write_text("a-first-key\n")
    has_terminal = True
    monkeypatch.setattr("quire_server.programs.serving.os.isatty", lambda _descriptor: has_terminal)
    credentials = Credentials(Settings(api_key=(f"@{file}",)))
    loop = asyncio.get_running_loop()
    stop = Stop(asked=loop.create_future(), insisted=loop.create_future())
    with _reloads(credentials, stop):
        file.write_text("a-second-key\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: hashlib.sha256(b"a-second-key").digest() in credentials.known.api)
        await until(lambda: bool(audited(caplog)))
        file.write_text("# none\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: len(audited(caplog)) == 2)
        assert not stop.asked.done()
        has_terminal = False
        os.kill(os.getpid(), signal.SIGHUP)
        await until(stop.asked.done)
    told = [(line, fields["status"]) for line, fields in audited(caplog)]
    assert told == [("reload by SIGHUP: 200", 200), ("reload by SIGHUP: 400", 400)]
    assert list(credentials.known.api) == [hashlib.sha256(b"a-second-key").digest()]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificates, Certificates]:
    folders = (tmp_path_factory.mktemp(name) for name in ("before", "after"))
    return make_certificates(next(folders)), make_certificates(next(folders))


def trusting(one: Certificates, *, with_client: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(one.authority))
    if with_client:
        context.load_cert_chain(one.client, one.client_key)
    return context


async def reached(url: str, one: Certificates, *, with_client: bool = False) -> bool:
    async with httpx.AsyncClient(verify=trusting(one, with_client=with_client)) as client:
        try:
            return (await client.get(f"{url}/health")).status_code == 200
        except httpx.TransportError:
            return False


@pytest.mark.parametrize("asks_clients", [False, True])
async def test_the_next_handshake_shows_the_new_certificate(
    certificates: tuple[Certificates, Certificates], tmp_path: Path, asks_clients: bool
) -> None:
    before, after = certificates
    files = {name: tmp_path / name for name in ("server", "server_key", "authority")}

    def place(one: Certificates, *names: str) -> None:
        for name in names:
            shutil.copy(getattr(one, name), files[name])

    place(before, *files)
    settings = {"ssl_certfile": files["server"], "ssl_keyfile": files["server_key"], "allow_local_admin": True}
    if asks_clients:
        settings |= {"ssl_ca_certs": files["authority"], "ssl_cert_reqs": 2}
    engine = FakeEngine()
    engine.hold()
    app = make_app(make_state(engine=engine, admin_api_key=("operator-key",), **settings))
    async with listening(app) as server:
        url = server.address
        context = trusting(before, with_client=asks_clients)
        async with httpx.AsyncClient(verify=context, base_url=url) as client:
            running = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": True}))
            await until(lambda: bool(engine.live))
            place(after, "server")  # the key is still that of the other certificate
            message = (await reload(client, 400))["error"]["message"]
            assert f"--ssl-certfile {files['server']}" in message
            assert "another certificate" in message
            assert await reached(url, before, with_client=asks_clients)
            place(after, *files)
            told = await reload(client)
            found = expiry(after.server.read_text())
            assert found is not None
            assert told["certificate_expires"] == found.isoformat(timespec="seconds")
            assert await reached(url, after, with_client=asks_clients)
            assert not await reached(url, before, with_client=asks_clients)
            engine.release()
            stream = await running
            assert stream.text.endswith("data: [DONE]\n\n"), "on the connection of the old certificate"
    if asks_clients:
        assert not await reached(url, after)


async def test_a_session_is_no_way_around_the_new_authorities(
    certificates: tuple[Certificates, Certificates], tmp_path: Path
) -> None:
    before, after = certificates
    authority = tmp_path / "authority"
    shutil.copy(before.authority, authority)
    state = make_state(
        ssl_certfile=before.server, ssl_keyfile=before.server_key, ssl_ca_certs=authority, ssl_cert_reqs=2
    )
    context = trusting(before, with_client=True)
    context.minimum_version = ssl.TLSVersion.TLSv1_3

    def call(port: int, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=300) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as link,
        ):
            link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if not link.recv(100).startswith(b"HTTP/1.1 200"):
                raise ConnectionError("closed")
            return link.session

    async with listening(make_app(state)) as server:
        assert server.port is not None
        session = await asyncio.to_thread(call, server.port, None)
        shutil.copy(after.authority, authority)
        await state.credentials.reload()
        for kept in (session, None):
            with pytest.raises(OSError):
                await asyncio.to_thread(call, server.port, kept)


def test_the_end_of_a_certificate_is_read(certificates: tuple[Certificates, Certificates]) -> None:
    import subprocess

    file = certificates[0].server
    said = subprocess.run(
        ["openssl", "x509", "-in", file, "-noout", "-enddate", "-dateopt", "iso_8601"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = expiry("a text before it\n" + file.read_text())
    assert found is not None
    assert found.strftime("notAfter=%Y-%m-%d %H:%M:%SZ") == said.stdout.strip()
    assert expiry("") is None
    assert expiry("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----") is None


def audited(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, object]]]:
    records = [each for each in caplog.records if each.name == "quire.audit"]
    return [(each.getMessage(), each.__dict__["told"] | {"status": each.__dict__["status"]}) for each in records]


async def test_each_order_has_an_audit_line(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, logger="quire.audit")
    file = tmp_path / "keys"
    file.write_text("a-plain-key\n")
    settings = {"api_key": (f"@{file}",), "admin_api_key": ("ops=operator-key", "other-operator")}
    async with served(disable_access_log=True, **settings) as client:
        for path, key, body in (
            ("/admin/abort", "operator-key", {"tenant": "acme"}),
            ("/admin/reload", "other-operator", None),
            ("/admin/abort", "a-plain-key", {"all": True}),
            ("/admin/abort", "operator-key", {"secret": "hidden"}),
        ):
            await client.post(path, headers={"authorization": f"Bearer {key}"}, json=body)
        file.unlink()
        await reload(client, 400)
        await client.get("/admin/drain", headers=OPERATOR)
        await client.get("/v1/models", headers={"x-api-key": "a-plain-key"})
    told = audited(caplog)
    assert [line.partition(" at ")[0] for line, _ in told] == [
        'POST /admin/abort {"tenant": "acme"} by ops',
        "POST /admin/reload by admin",
        "POST /admin/abort by 127.0.0.1: 401",
        "POST /admin/abort by ops",
        "POST /admin/reload by ops",
    ]
    assert [fields["status"] for _, fields in told] == [200, 200, 401, 400, 400]
    assert told[0][1]["arguments"] == {"tenant": "acme"}
    assert told[0][1]["by"] == "ops at 127.0.0.1"
    assert not any(secret in json.dumps(told) for secret in ("operator-key", "a-plain-key", "hidden"))

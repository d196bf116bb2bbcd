"""Who may connect to a node: certificates made as the documents say, garbled bytes, idle peers, late nonsense."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.links.handshake import HELLO_BYTES, TO_ENGINE, VERSION, Refused, check_hello, hello, session_key
from quire_engine.links.link_security import LinkSecurity, link_security
from quire_engine.process.transport import Abort, Codec, Hold, encode_frame
from quire_server.engine.nodes import node as node_module
from quire_server.engine.nodes import remote_engine
from quire_server.engine.nodes.addresses import Address
from quire_server.engine.nodes.frames import FROM_FRONT, FROM_NODE
from quire_server.engine.nodes.link import Link, UnfinishedFrames
from quire_server.engine.nodes.remote_engine import RemoteEngine
from quire_server.engine.recovery import Quarantine
from support.events import until
from support.link_secrets import make_secrets
from support.nodes import Served, front, served_node
from support.supervising import expected, request, run

NEWER = hello()[:8] + (VERSION + 1).to_bytes(2, "big") + hello()[10:]


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> tuple[LinkSecurity, ...]:
    """The secrets of a cluster, those of another one, and those of one that has only the first one's authority."""
    own, other = (tmp_path_factory.mktemp(name) for name in ("own", "other"))
    secrets = make_secrets(own), make_secrets(other)
    return *secrets, link_security(other / "peer.crt", other / "peer.key", own / "ca.crt")


@asynccontextmanager
async def decoding_counted(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[int]]:
    """The kinds of the frames that the node has decoded."""
    decoded: list[int] = []
    plain = Codec.decode

    def decode(self: Codec, kind: int, payload: bytes) -> object:
        if self is FROM_FRONT:
            decoded.append(kind)
        return plain(self, kind, payload)

    monkeypatch.setattr(Codec, "decode", decode)
    yield decoded


async def why_refused(node: Served, security: LinkSecurity) -> str:
    """What a front says that connects with these secrets."""
    engine = RemoteEngine(node.address, security, check=lambda _: "", quarantine=Quarantine(), silence_seconds=2.0)
    engine.begin()
    try:
        async with asyncio.timeout(300):
            while engine.why == "not connected yet":  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    finally:
        await engine.stop()
    return engine.why


def test_the_documents_secrets_open_a_node_and_others_do_not(
    documented: tuple[LinkSecurity, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        remote_engine, "CONNECT_SECONDS", 1.0
    )  # without TLS either side waits for the other's first word
    own, other, foreign = documented
    bare = ssl.create_default_context(cafile=None)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    strangers = {
        "another authority": other,
        "a certificate of another authority": foreign,
        "no certificate": LinkSecurity(connecting=bare),
        "no TLS": LinkSecurity(),
    }

    async def body() -> None:
        async with decoding_counted(monkeypatch) as decoded, served_node(security=own) as node:
            pid = node.supervisor.pid
            for what, secrets in strangers.items():
                why = await why_refused(node, secrets)
                assert ("handshake failed" in why) == ("certificate" in what), (what, why)
            await until(lambda: node.node.num_refused >= len(strangers))  # it sees the last one's end after that one
            assert decoded == []
            assert node.node.num_fronts == 0
            async with front([node.address], security=own) as (together, client):
                together.submit(request("r", (1,), tokens=20))
                await client.until(lambda: ("r", 0) in client.ends)
                assert client.tokens["r", 0] == expected((1,), 20)
            assert decoded
            assert (node.supervisor.restarts, node.supervisor.pid) == (0, pid)

    run(body)


def test_two_authorities_in_one_file_are_accepted_in_any_order(tmp_path: Path) -> None:
    """As while one takes the place of the other."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        make_secrets(folder)
    both = tmp_path / "both.crt"

    async def body() -> None:
        for first, second in ((old, new), (new, old)):
            both.write_bytes((first / "ca.crt").read_bytes() + (second / "ca.crt").read_bytes())
            ends = [link_security(each / "peer.crt", each / "peer.key", both) for each in (old, new)]
            async with (
                served_node(security=ends[0]) as node,
                front([node.address], security=ends[1]) as (together, client),
            ):
                together.submit(request("r", (1,), tokens=3))
                await client.until(lambda: ("r", 0) in client.ends)

    run(body)


def test_a_front_does_not_speak_to_a_node_without_certificates(documented: tuple[LinkSecurity, ...]) -> None:
    async def body() -> None:
        async with served_node(security=LinkSecurity()) as node:
            assert await why_refused(node, documented[0])
        async with served_node(security=documented[1]) as node:
            assert await why_refused(node, documented[0])

    run(body)


async def garble(node: Served, count: int, seed: int) -> None:
    """So many messages that are no greeting, each on a connection of its own."""
    rng = random.Random(seed)
    for number in range(count):
        reader, writer = await asyncio.open_connection(node.address.host, node.address.port)
        await reader.readexactly(HELLO_BYTES)
        message = [
            rng.randbytes(HELLO_BYTES),
            encode_frame(EngineConfig(model="x")),
            hello(TO_ENGINE),
            hello()[: rng.randrange(HELLO_BYTES)],
            rng.randbytes(HELLO_BYTES) + b"\xff" * 64,
            NEWER,
        ][number % 6]
        writer.write(message)
        if len(message) < HELLO_BYTES:
            writer.write_eof()
        assert await reader.read(1) == b"", "nothing is said to who has not greeted"
        writer.close()


def test_garbled_messages_are_refused_before_anything_is_decoded_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with decoding_counted(monkeypatch) as decoded, served_node() as node:
            async with front([node.address]) as (together, client):
                together.submit(request("r", (1,), tokens=500))
                await garble(node, 60, seed=0)
                decoded.clear()
                process, tasks = psutil.Process(), len(asyncio.all_tasks())
                handles = process.num_fds()
                await asyncio.gather(*(garble(node, 30, seed=seed) for seed in range(1, 7)))
                await asyncio.sleep(0.1)
                assert set(decoded) <= {34}, "the pings of the front that belongs here"
                assert node.node.num_refused >= 240
                assert process.num_fds() <= handles + 2
                assert len(asyncio.all_tasks()) <= tasks + 2
                await client.until(lambda: ("r", 0) in client.ends)
                assert client.tokens["r", 0] == expected((1,), 500)
            assert node.supervisor.restarts == 0

    run(body)


def test_idle_peers_are_few_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "HANDSHAKE_SECONDS", 1.0)

    async def body() -> None:
        async with served_node() as node, front([node.address]) as (together, client):
            together.submit(request("r", (1,), tokens=500))
            idle = [await asyncio.open_connection(node.address.host, node.address.port) for _ in range(80)]
            async with asyncio.timeout(300):
                while node.node.num_refused < 80 - node_module.MOST_UNPROVEN:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert len(node.node._unproven) <= node_module.MOST_UNPROVEN
            async with front([node.address]) as (second, others):  # strangers keep no front out
                second.submit(request("s", (1,), tokens=3))
                await others.until(lambda: ("s", 0) in others.ends)
            async with asyncio.timeout(300):
                for reader, _ in idle:
                    await reader.read()
            for _, writer in idle:
                writer.close()
            await client.until(lambda: ("r", 0) in client.ends)
            assert client.tokens["r", 0] == expected((1,), 500)

    run(body)


async def connected(node: Served) -> Link:
    """A front that has greeted, and may say anything."""
    link = Link(reads=FROM_NODE, sends=FROM_FRONT)
    await asyncio.get_running_loop().create_connection(lambda: link, node.address.host, node.address.port)
    check_hello(await link.exactly(HELLO_BYTES))
    link.write(hello())
    link.begin(lambda _: None)
    return link


def test_the_oldest_stranger_of_the_host_that_has_most_gives_its_place() -> None:
    async def body() -> None:
        async with served_node() as node:
            tasks = {asyncio.create_task(asyncio.sleep(60)): host for host in ("a", "b", "b", "c")}
            node.node._unproven.update(tasks)
            node.node._make_place()
            assert list(node.node._unproven.values()) == ["a", "b", "c"]
            await asyncio.sleep(0)
            assert [task.cancelled() for task in tasks] == [False, True, False, False]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            node.node._unproven.clear()

    run(body)


def test_unfinished_frames_of_all_connections_have_one_bound() -> None:
    async def body() -> None:
        frames = UnfinishedFrames(most=5_000)
        links = [Link(reads=FROM_FRONT, sends=FROM_NODE, unfinished=frames) for _ in range(3)]
        begun = (1 << 20).to_bytes(4, "little") + b"\x02"
        for link in links:
            link.begin(lambda _: None)
        links[0].data_received(begun + bytes(1_000))
        links[1].data_received(begun + bytes(3_000))
        assert not any(link.lost.done() for link in links)
        links[2].data_received(begun + bytes(1_500))
        assert [link.lost.done() for link in links] == [False, True, False], "the one that holds most"
        links[0].connection_lost(None)
        links[2].data_received(bytes(3_000))
        assert not links[2].lost.done(), "a lost connection holds nothing"

    run(body)


NONSENSE = {
    "a frame of an engine's start": encode_frame(EngineConfig(model="x")),
    "a frame of 4 GiB": b"\xff\xff\xff\xff\x02",
    "no msgpack": (8).to_bytes(4, "little") + b"\x02" + b"\xc1" * 8,
    "an unknown kind": (1).to_bytes(4, "little") + b"\x63" + b"\x00",
}


def test_nonsense_of_a_front_ends_its_own_requests_and_nobody_elses() -> None:
    async def body() -> None:
        async with served_node() as node, front([node.address]) as (together, client):
            for number, (what, nonsense) in enumerate(NONSENSE.items()):
                name = f"r{number}"
                together.submit(request(name, (1,), tokens=100))
                bad = await connected(node)
                bad.send(request("theirs", (2,), tokens=900))
                await client.until(lambda: node.node.num_live == 2)
                bad.write(nonsense)
                async with asyncio.timeout(300):
                    await bad.lost
                await client.until(lambda name=name: (name, 0) in client.ends)
                assert client.tokens[name, 0] == expected((1,), 100), what
                counts = (node.node.num_live, node.node.num_fronts, node.supervisor.restarts)
                assert counts == (0, 1, 0), what

    run(body)


def test_a_front_cannot_touch_another_fronts_requests() -> None:
    async def body() -> None:
        async with served_node() as node, front([node.address]) as (together, client):
            together.submit(request("r", (1,), tokens=300))
            await client.until(lambda: ("r", 0) in client.tokens)
            other = await connected(node)
            for frame in (Hold(request_id="r"), Abort(request_id="r"), request("r", (9,), tokens=5)):
                other.send(frame)
            await client.until(lambda: ("r", 0) in client.ends)
            assert client.tokens["r", 0] == expected((1,), 300)
            other.close()

    run(body)


def test_a_greeting_is_of_one_purpose_and_version_and_of_one_connection() -> None:
    check_hello(hello())
    check_hello(hello(TO_ENGINE), TO_ENGINE)
    for other in (hello(TO_ENGINE), b"HTTP/1.1 400 Bad Request".ljust(HELLO_BYTES)):
        with pytest.raises(Refused, match="no node or front of Quire"):
            check_hello(other)
    with pytest.raises(Refused, match=f"version {VERSION + 1} of the protocol, this one version {VERSION}"):
        check_hello(NEWER)
    assert len({session_key(hello(), hello()) for _ in range(8)}) == 8


def test_files_that_cannot_be_used_are_named(tmp_path: Path, documented: tuple[LinkSecurity, ...]) -> None:
    key = tmp_path / "key"
    key.write_text("no PEM")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--engine-tls-key .*every user of this machine can read it"):
        link_security(key, key, key)
    key.chmod(0o600)
    with pytest.raises(ConfigError, match="belong together"):
        link_security(key, None, None)
    with pytest.raises(ConfigError, match="--engine-tls-cert"):
        link_security(key, key, key)
    with pytest.raises(ConfigError, match=r"--engine-tls-cert .*gone .*: No such file"):
        link_security(tmp_path / "gone", key, key)


def test_beyond_this_machine_certificates_are_needed(documented: tuple[LinkSecurity, ...]) -> None:
    plain = LinkSecurity()
    for host in ("10.0.0.7", "0.0.0.0", "::", "fd00::7"):
        with pytest.raises(ConfigError, match=r"beyond this machine.*set --engine-tls-cert, ") as caught:
            plain.check_reach("--listen", [host])
        assert "\n" not in str(caught.value)
    plain.check_reach("--listen", ["127.0.0.1", "::1"])
    documented[0].check_reach("--listen", ["0.0.0.0"])


def test_a_node_does_not_listen_beyond_this_machine_without_secrets() -> None:
    async def body() -> None:
        with pytest.raises(ConfigError, match=r"--listen 0\.0\.0\.0:0 is beyond this machine"):
            async with served_node() as node:
                await node.node.listen(Address("0.0.0.0", 0))
        assert "beyond this machine" in await why_refused(_Nowhere(), LinkSecurity())

    run(body)


class _Nowhere:
    address = Address("192.0.2.1", 9)

"""KV blocks between two pools over real sockets: what is lent, what is leased, who is let in."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire_engine.contract.block_store import Payload
from quire_engine.execution.kv.pool_rows import PoolRows
from quire_engine.links import kv_fetching, kv_lending
from quire_engine.links.kv_transfer import KVTransfer
from quire_engine.links.link_security import LinkSecurity, link_security
from quire_engine.links.memory_agents import MooncakeAgent, NixlAgent
from quire_engine.links.memory_link import MemoryAgent
from support.kv_wire import KVWire
from support.link_secrets import make_secrets

BLOCKS, SIZE = 40, 4096
KEYS = [bytes([number]) * 32 for number in range(BLOCKS)]
PLAIN = LinkSecurity()


class Pool(KVTransfer):
    """A pool with the transfer of its blocks."""

    def __init__(
        self,
        security: LinkSecurity = PLAIN,
        listening: str = "127.0.0.1:0",
        name: str = "model",
        agent: MemoryAgent | None = None,
    ) -> None:
        self.tensor = torch.zeros((BLOCKS, SIZE), dtype=torch.uint8)
        rows = PoolRows(self.tensor)
        super().__init__(rows, listening, security, layout=lambda digest: digest.encode(), agent=agent)
        if name:
            self.name_model(name)

    def hold(self, *blocks: int) -> None:
        """Compute these blocks: each has its number in all bytes."""
        for block in blocks:
            self.tensor[block] = block + 1
            self.offer(KEYS[block], block)

    def overwrite(self, *blocks: int) -> None:
        for block in blocks:
            self.lose(KEYS[block])
            self.tensor[block] = 255

    def arrivals(self, count: int) -> list[tuple[int, Payload | None]]:
        """The next so many arrivals: the number of the key, and what came."""
        taken: list[tuple[int, Payload | None]] = []
        deadline = time.monotonic() + 300
        while len(taken) < count:
            assert time.monotonic() < deadline, taken
            self.wait(0.05)
            taken += [(key[0], payload) for key, payload in self.take()]
        return taken


Agents = tuple[MemoryAgent, MemoryAgent] | tuple[None, None]


@pytest.fixture(scope="module")
def nixl() -> Agents:
    pytest.importorskip("nixl", reason="quire[nixl] is not installed")
    return NixlAgent(), NixlAgent()


@pytest.fixture(scope="module")
def mooncake() -> Agents:
    why = "quire[mooncake] is not installed, or libibverbs1 is not"
    pytest.importorskip("mooncake.engine", reason=why, exc_type=ImportError)
    return MooncakeAgent("127.0.0.1"), MooncakeAgent("127.0.0.1")


@pytest.fixture(params=["nixl", "mooncake"])
def readers(request: pytest.FixtureRequest) -> Agents:
    """What reads memory for the two pools."""
    found: Agents = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["tcp", "nixl", "mooncake"])
def agents(request: pytest.FixtureRequest) -> Agents:
    """How blocks travel: those of the two pools."""
    found: Agents = (None, None) if request.param == "tcp" else request.getfixturevalue(request.param)
    return found


@contextmanager
def pools(agents: Agents = (None, None), **options: object) -> Iterator[tuple[Pool, Pool]]:
    one, other = (Pool(agent=agent, **options) for agent in agents)  # type: ignore[arg-type]
    try:
        yield one, other
    finally:
        one.close()
        other.close()


def whole(*numbers: int) -> list[tuple[int, bytes]]:
    return [(number, bytes([number + 1]) * SIZE) for number in numbers]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_blocks_come_in_order_and_as_they_are_computed(agents: Agents) -> None:
    with pools(agents) as (lender, fetcher):
        lender.hold(0, 1, 2)
        fetcher.fetch("a", lender.address, KEYS[:6], is_computed=True)
        assert fetcher.arrivals(3) == whole(0, 1, 2)
        until(lambda: lender.counts.leased == 3)
        lender.hold(4, 5)
        lender.hold(3)
        assert fetcher.arrivals(3) == whole(3, 4, 5)
        until(lambda: lender.counts.leased == 0)
        assert (lender.counts.sent, fetcher.counts.received, fetcher.counts.missed) == (6, 6, 0)
        assert fetcher.counts.received_bytes == 6 * SIZE
        assert fetcher.block_seconds(lender.address) > 0
        assert fetcher.block_seconds("127.0.0.1:1") == 0


def test_what_is_not_computed_and_not_there_is_a_miss_at_once(agents: Agents) -> None:
    with pools(agents) as (lender, fetcher):
        lender.hold(0, 1)
        fetcher.fetch("a", lender.address, KEYS[:4], is_computed=False)
        assert fetcher.arrivals(4) == [*whole(0, 1), (2, None), (3, None)]
        assert fetcher.counts.missed == 2
        until(lambda: lender.counts.leased == 0)


def test_fetches_share_a_connection_and_none_waits_for_another(agents: Agents) -> None:
    with pools(agents) as (lender, fetcher), KVWire(lender.address) as wire:
        fetcher.fetch("slow", wire.address, KEYS[:2], is_computed=True)
        until(lambda: lender.counts.leased == 2)
        lender.hold(*range(2, 12))
        fetcher.fetch("a", wire.address, KEYS[2:7], is_computed=False)
        fetcher.fetch("b", wire.address, KEYS[7:12], is_computed=False)
        assert sorted(fetcher.arrivals(10)) == whole(*range(2, 12))  # type: ignore[comparison-overlap]
        fetcher.cancel("slow")
        until(lambda: lender.counts.leased == 0)
        assert (wire.num_connections, fetcher.counts.missed) == (1, 2)


def test_what_somebody_waits_for_outlives_its_place_in_the_pool(
    monkeypatch: pytest.MonkeyPatch, agents: Agents
) -> None:
    monkeypatch.setattr(kv_lending, "MOST_LEASED", 2 * SIZE)
    with pools(agents) as (lender, fetcher):
        lender.hold(1, 2, 3, 4)
        fetcher.fetch("a", lender.address, KEYS[:5], is_computed=True)  # the first one is not there yet
        until(lambda: lender.counts.leased == 5)
        lender.overwrite(4, 1, 2)  # there is room for two copies
        lender.hold(0)
        assert fetcher.arrivals(2) == whole(0, 1)
        until(lambda: lender.counts.leased == 3)
        lender.hold(2)
        assert fetcher.arrivals(3) == whole(2, 3, 4)
        lender.hold(1, 2, 3)
        fetcher.fetch("b", lender.address, KEYS[10:12], is_computed=True)
        until(lambda: lender.counts.leased == 2)
        lender.clear()
        fetcher.fetch("c", lender.address, KEYS[1:3], is_computed=False)
        assert fetcher.arrivals(2) == [(1, None), (2, None)]


def test_a_lease_ends_without_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_lending, "LEASE_SECONDS", 0.2)
    monkeypatch.setattr(kv_fetching, "_STAY_SECONDS", 60.0)
    with pools() as (lender, fetcher):
        fetcher.fetch("a", lender.address, KEYS[:3], is_computed=True)
        until(lambda: lender.counts.leased == 3)
        assert fetcher.arrivals(3) == [(0, None), (1, None), (2, None)]
        assert lender.counts.leased == 0


def test_signs_of_life_keep_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_lending, "LEASE_SECONDS", 1.0)
    monkeypatch.setattr(kv_lending, "_LOOK_SECONDS", 0.1)
    for name in ("_STAY_SECONDS", "_LOOK_SECONDS"):
        monkeypatch.setattr(kv_fetching, name, 0.05)
    with pools() as (lender, fetcher):
        fetcher.fetch("a", lender.address, KEYS[:1], is_computed=True)
        time.sleep(1.3)
        assert lender.counts.leased == 1
        lender.hold(0)
        assert fetcher.arrivals(1) == whole(0)


def test_an_engine_that_comes_back_is_asked_again(monkeypatch: pytest.MonkeyPatch, agents: Agents) -> None:
    monkeypatch.setattr(kv_fetching, "RETRY_SECONDS", 0.0)
    with pools(agents) as (lender, fetcher):
        fetcher.fetch("a", lender.address, KEYS[:2], is_computed=True)
        until(lambda: lender.counts.leased == 2)
        lender.close()
        assert fetcher.arrivals(2) == [(0, None), (1, None)]
        fetcher.fetch("b", lender.address, KEYS[:1], is_computed=True)
        assert fetcher.arrivals(1) == [(0, None)]
        again = Pool(listening=lender.address, agent=agents[0])
        try:
            again.hold(0)
            fetcher.fetch("c", lender.address, KEYS[:1], is_computed=True)
            assert fetcher.arrivals(1) == whole(0)
        finally:
            again.close()


def test_who_stops_in_the_middle_of_a_block_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.links.kv_link.STUCK_SECONDS", 0.5)
    with pools() as (lender, fetcher), KVWire(lender.address) as wire:
        lender.hold(0, 1)
        wire.stop_at = SIZE  # in the middle of the first block
        fetcher.fetch("a", wire.address, KEYS[:2], is_computed=False)
        assert fetcher.arrivals(2) == [(0, None), (1, None)]


def test_more_blocks_are_read_than_there_are_places_for_and_a_damaged_one_is_refused(readers: Agents) -> None:
    with pools(readers) as (lender, fetcher):
        lender.hold(*range(BLOCKS))
        fetcher.fetch("a", lender.address, KEYS, is_computed=False)
        assert fetcher.arrivals(BLOCKS) == whole(*range(BLOCKS))
        (link,) = lender._lender._links
        damaged = bytes(SIZE - 1) + b"x"
        digest = link._digest
        link._digest = lambda *where: digest(*where[:-1], damaged)  # type: ignore[method-assign]
        fetcher.fetch("b", lender.address, KEYS[:3], is_computed=True)
        assert fetcher.arrivals(3) == [(0, None), (1, None), (2, None)]
        assert fetcher.counts.refused == 1
    with pools() as (lender, _):
        lender.hold(0)
        other = Pool(agent=readers[1])
        try:
            other.fetch("a", lender.address, KEYS[:1], is_computed=False)
            assert other.arrivals(1) == [(0, None)], "one side has another transport"
        finally:
            other.close()


def test_links_with_certificates_carry_blocks_and_others_are_refused(tmp_path: Path) -> None:
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    own, other = (make_secrets(tmp_path / name) for name in ("own", "other"))
    foreign = link_security(tmp_path / "other/peer.crt", tmp_path / "other/peer.key", tmp_path / "own/ca.crt")
    with pools(security=own) as (lender, fetcher), KVWire(lender.address) as wire:
        lender.hold(*range(20))
        fetcher.fetch("a", wire.address, KEYS[:20], is_computed=False)
        assert fetcher.arrivals(20) == whole(*range(20))
        for theirs in (other, foreign, PLAIN):
            stranger = Pool(theirs)
            stranger.fetch("a", lender.address, KEYS[:1], is_computed=False)
            assert stranger.arrivals(1) == [(0, None)]
            stranger.close()
        assert lender.counts.sent == 20
        # A flipped byte on the wire ends the connection, and the rest is a miss.
        wire.flip_at = wire.num_bytes + 3 * SIZE
        fetcher.fetch("b", wire.address, KEYS[:20], is_computed=False)
        came = fetcher.arrivals(20)
        assert came[-1] == (19, None)
        assert [each for each in came if each[1] is not None] == whole(*range(20))[: fetcher.counts.received - 20]


def test_garbled_messages_end_their_connection_and_no_other() -> None:
    with pools() as (lender, fetcher):
        lender.hold(0, 1)
        host, _, port = lender.address.rpartition(":")
        for number in range(50):
            with socket.create_connection((host, int(port)), timeout=300) as peer:
                peer.sendall(os.urandom(74 + number % 3 * 1000))
                peer.settimeout(300)
                try:
                    while peer.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
        fetcher.fetch("a", lender.address, KEYS[:2], is_computed=False)
        assert fetcher.arrivals(2) == whole(0, 1)


def test_what_has_come_and_is_not_taken_is_bounded(monkeypatch: pytest.MonkeyPatch, agents: Agents) -> None:
    monkeypatch.setattr(kv_fetching, "MOST_ARRIVED", 4 * SIZE)
    with pools(agents) as (lender, fetcher):
        lender.hold(*range(BLOCKS))
        fetcher.fetch("a", lender.address, KEYS, is_computed=False)
        until(lambda: fetcher.counts.received >= 4)
        time.sleep(0.1)
        assert fetcher.counts.received == 4
        assert fetcher.arrivals(BLOCKS) == whole(*range(BLOCKS))


def test_what_is_cancelled_does_not_come(agents: Agents) -> None:
    with pools(agents) as (lender, fetcher):
        lender.hold(0, 1)
        fetcher.fetch("a", lender.address, KEYS[:3], is_computed=True)
        until(lambda: fetcher.counts.received == 2)
        fetcher.cancel("a")
        assert list(fetcher.take()) == []
        until(lambda: lender.counts.leased == 0)
        fetcher.fetch("a", lender.address, KEYS[:2], is_computed=True)
        assert fetcher.arrivals(2) == whole(0, 1)

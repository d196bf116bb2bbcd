"""Addresses as operators write them, names whose addresses change, and the sizes of a front that follow."""

from __future__ import annotations

import asyncio

import pytest

from quire_engine.contract.errors import ConfigError
from quire_server.engine.nodes import addresses
from quire_server.engine.nodes.addresses import Address, Source, members, parse_address, parse_sources
from support.fake_engine_process import make_plan
from support.nodes import front, ready, served_node
from support.supervising import expected, request, run


def test_addresses_are_read_and_shown() -> None:
    assert parse_address("10.0.0.7:9000", "--listen") == Address("10.0.0.7", 9000)
    assert str(parse_address("[::1]:9000", "--listen")) == "[::1]:9000"
    assert parse_sources(("a:1,dns:quire-nodes:9000", "a:1")) == (
        Source(Address("a", 1), has_many=False),
        Source(Address("quire-nodes", 9000), has_many=True),
    )
    for text in ("9000", "a:", ":9000", "a:b", "a:99999", "::1:9000", "dns::9000", "a:0", ""):
        with pytest.raises(ConfigError, match="--engines"):
            parse_sources((text,))


def test_nodes_join_and_leave_with_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[Address] = []
    is_known = True

    async def resolve(address: Address) -> list[Address]:
        if address.host != "all-nodes":
            return [address]
        if not is_known:
            raise OSError("no answer")
        return list(known)

    monkeypatch.setattr(addresses, "resolve", resolve)

    async def body() -> None:
        nonlocal is_known
        async with served_node() as first, served_node() as second:
            known.append(first.address)
            # Nodes on 127.0.0.1 have ports of their own, which a name of a real cluster would not have.
            async with front([Source(Address("all-nodes", 9000), has_many=True)]) as (together, client):
                assert list(together._nodes) == [str(first.address)]
                sizes: list[int] = []
                together.on_members = lambda: sizes.append(together.num_replicas)
                known.append(second.address)
                await together._refresh()
                await ready(together, 2)
                assert together.whole_plan(make_plan()).scheduler.num_blocks == 1024
                together.submit(request("r", (1,), tokens=400))
                is_known = False
                await first.node.close()
                async with asyncio.timeout(300):
                    while together.rows()[0].state != "lost":  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                known.remove(first.address)
                await together._refresh()
                assert together.num_replicas == 2, "a name that is not answered says nothing"
                is_known = True
                await together._refresh()
                assert list(together._nodes) == [str(second.address)]
                await client.until(lambda: ("r", 0) in client.ends)
                assert client.tokens["r", 0] == expected((1,), 400)
                known.clear()
                await together._refresh()
                assert together.num_replicas == 1, "one that answers has left its name first, and drains"
                assert sizes[-1] == 1

    run(body)


def test_a_name_is_resolved_to_all_its_addresses() -> None:
    async def body() -> None:
        found, is_whole = await members((Source(Address("localhost", 1), has_many=True),))
        assert is_whole
        assert Address("127.0.0.1", 1) in found
        found, is_whole = await members((Source(Address("no-such-name.invalid", 1), has_many=True),))
        assert (found, is_whole) == ([], False)

    run(body)

"""How many connections an address may have, and whose are not counted."""

from __future__ import annotations

import pytest

from quire_server.http.connection import Addresses


def test_an_address_has_its_share() -> None:
    addresses = Addresses(2)
    places = [addresses.enter("192.0.2.1") for _ in range(3)]
    assert [is_too_many for _, is_too_many in places] == [False, False, True]
    assert addresses.enter("192.0.2.2") == ("192.0.2.2", False)
    for place, _ in places[:2]:
        addresses.leave(place)
    assert addresses.enter("192.0.2.1")[1] is False


def test_one_client_has_a_whole_network_of_ipv6() -> None:
    addresses = Addresses(1)
    assert addresses.enter("2001:db8::1") == ("2001:db8::/64", False)
    assert addresses.enter("2001:db8::ffff:2")[1] is True
    assert addresses.enter("2001:db8:0:1::1")[1] is False
    assert addresses.enter("::ffff:192.0.2.1") == ("192.0.2.1", False)
    assert addresses.enter("fe80::1%eth0")[0] == "fe80::/64"


@pytest.mark.parametrize("host", [None, "", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "10.1.2.3", "client"])
def test_who_is_not_counted(host: str | None) -> None:
    addresses = Addresses(1, ["10.0.0.0/8"])
    for _ in range(3):
        place, is_too_many = addresses.enter(host)
        assert not is_too_many
        addresses.leave(place)
    assert addresses.enter(host) == (None, False)

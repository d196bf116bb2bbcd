"""How many connections each address has open.

Promises: one client cannot take the connections of all; proxies, this machine and Unix sockets, behind which many are,
are not counted. Must not know: HTTP, what a connection does.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address, ip_network

LOOPBACK = ("127.0.0.0/8", "::1")  # a proxy on this machine, and who could take its connections otherwise, too
_PREFIX = 64  # bits of an IPv6 address that a client cannot choose


class Addresses:
    """Counts open connections by address, of IPv6 by its network."""

    def __init__(self, most: int, uncounted: Iterable[str] = ()) -> None:
        self._most = most
        self._uncounted = [ip_network(name) for name in (*LOOPBACK, *uncounted)]
        self._open: dict[str, int] = {}

    def enter(self, host: str | None) -> tuple[str | None, bool]:
        """What to give to `leave` when the connection ends, and whether it is one too many."""
        place = self._place(host)
        if place is None:
            return None, False
        number = self._open[place] = self._open.get(place, 0) + 1
        return place, number > self._most

    def leave(self, place: str | None) -> None:
        if place is None:
            return
        number = self._open.pop(place) - 1
        if number:
            self._open[place] = number

    def _place(self, host: str | None) -> str | None:
        try:
            address = ip_address((host or "").partition("%")[0])
        except ValueError:
            return None  # a Unix socket, or a test without one
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        if any(address in network for network in self._uncounted):
            return None
        if isinstance(address, IPv6Address):
            return str(ip_network((address, _PREFIX), strict=False))
        return str(address)

"""Where nodes are: addresses as operators write them, and names that stand for several of them.

`host:port` is one node; `dns:name:port` is one at each address of the name, which is asked for again and again.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from quire_engine.errors import ConfigError

_DNS = "dns:"

log = logging.getLogger("quire.nodes")


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host, by name or number, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Source:
    """One word of --engines."""

    address: Address
    has_many: bool  # a node at each of the name's addresses


def parse_address(text: str, setting: str) -> Address:
    """`host:port` or `[::1]:port`. Raises ConfigError that names the setting."""
    host, divider, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_good = bool(divider and bare) and (bare != host or ":" not in host) and port.isascii() and port.isdigit()
    if not is_good or int(port) > 65535 or not bare.isprintable() or " " in bare:
        raise ConfigError(f"{setting} {text}: expected HOST:PORT, such as 10.0.0.7:9000 or [fd00::7]:9000")
    return Address(bare, int(port))


def parse_sources(words: Sequence[str]) -> tuple[Source, ...]:
    """The words of --engines, of which one may have several with commas; each address once. Raises ConfigError."""
    found = []
    for word in filter(None, ",".join(words).replace(" ", "").split(",")):
        address = parse_address(word.removeprefix(_DNS), "--engines")
        if address.port == 0:
            raise ConfigError(f"--engines {word}: a node's port is not 0")
        found.append(Source(address, word.startswith(_DNS)))
    if not found:
        raise ConfigError("--engines: expected at least one HOST:PORT or dns:NAME:PORT")
    return tuple(dict.fromkeys(found))


def is_numeric(host: str) -> bool:
    """Whether it is an IP address, and no name."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


async def resolve(address: Address) -> list[Address]:
    """The numeric addresses of a name, in order. Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    return sorted({Address(str(each[4][0]), address.port) for each in found})


async def members(sources: Sequence[Source]) -> tuple[list[Address], bool]:
    """The addresses of all nodes, and whether every name could be resolved: else there may be more of them."""
    found: list[Address] = []
    is_whole = True
    for source in sources:
        if not source.has_many:
            found.append(source.address)
            continue
        try:
            found += await resolve(source.address)
        except OSError as error:
            is_whole = False
            log.debug("the name %s cannot be resolved: %s", source.address.host, error)
    return list(dict.fromkeys(found)), is_whole

"""Addresses of nodes, as operators write them, and names that stand for several of them.

`host:port` is one node; `dns:name:port` is one at each address of the name, and `file:path` one for each line of a
file, both of which are asked for again and again.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from quire_engine.contract.errors import ConfigError
from quire_engine.plain_files import read_plain

_DNS = "dns:"
_FILE = "file:"
MOST_FILE_BYTES = 1 << 20  # of addresses; a longer file is none

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
    """One word of --engines: an address, a name that stands for several, or a file of addresses."""

    address: Address | None = None
    has_many: bool = False  # a node at each of the name's addresses
    file: Path | None = None  # instead of an address


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
        if word.startswith(_FILE):
            found.append(Source(file=Path(word.removeprefix(_FILE)).expanduser()))
            continue
        found.append(Source(_node_address(word.removeprefix(_DNS), f"--engines {word}"), word.startswith(_DNS)))
    if not found:
        raise ConfigError("--engines: expected at least one HOST:PORT, dns:NAME:PORT or file:PATH")
    return tuple(dict.fromkeys(found))


def _node_address(text: str, where: str) -> Address:
    """The address of a node, whose port is known. Raises ConfigError."""
    address = parse_address(text, where)
    if address.port == 0:
        raise ConfigError(f"{where}: a node's port is not 0")
    return address


def read_addresses(path: Path) -> list[Address]:
    """The addresses in a file, one a line; empty lines and those that begin with # say nothing.

    Raises OSError, and ConfigError for a line that is none.
    """
    try:
        raw = read_plain(path, MOST_FILE_BYTES)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise ConfigError(f"{path}: more than {MOST_FILE_BYTES:,} bytes are no list of nodes") from None
    lines = (line.strip() for line in raw.decode(errors="replace").splitlines())
    return [_node_address(line, str(path)) for line in lines if line and not line.startswith("#")]


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
    """The addresses of all nodes, and whether all names and files could be read: else there may be more of them."""
    found: list[Address] = []
    is_whole = True
    for source in sources:
        try:
            if source.file is not None:
                found += await asyncio.to_thread(read_addresses, source.file)
            elif source.address is not None:
                found += await resolve(source.address) if source.has_many else [source.address]
        except (OSError, ConfigError) as error:
            is_whole = False
            log.debug("nodes of %s are not known: %s", source.file or source.address, error)
    return list(dict.fromkeys(found)), is_whole

"""`quire health`: asks the server that runs here whether it takes requests; for container health checks.

Promises: without --url it asks where a server really listens, whatever flag, variable or file said so; exit code 0, or
1 and one line. Standard library only for servers, since it starts every few seconds. Must not know: the engine.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import ssl
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

_PATH = "/health/ready"
_SILENT = "does not answer"
_LISTENS_TCP, _LISTENS_UNIX = "0A", "00010000"  # the state's and the flags' column in /proc/net
_SERVERS = re.compile(r"(^|/)quire$|(^|\.)quire_server\.cli$|/quire_server/cli\.py$")
# As `quire engine` has them.
_OF_LINKS = {
    "engine-tls-cert": "a certificate for links to it",
    "engine-tls-key": "the private key of that",
    "engine-tls-ca": "certificate authorities of the nodes",
}
_REMOVED = "cluster-key-file"  # a flag once
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run(argv: Sequence[str]) -> int:
    """0 if every server that was found is ready."""
    asked = build_parser().parse_args(argv)
    if asked.node:
        return _node(asked)
    addresses = [asked.url] if asked.url else sorted(listening())
    if not addresses:
        print("quire health: no server listens here", file=sys.stderr)
        return 1
    ask = _trouble if asked.url else trouble_at
    found = [ask(address, asked.timeout) for address in addresses]
    for address, trouble in zip(addresses, found, strict=True):
        print(f"quire health: {address}: {trouble or 'ready'}", file=sys.stderr if trouble else sys.stdout)
    return 1 if any(found) else 0


def build_parser() -> argparse.ArgumentParser:
    """The command's own flags."""
    parser = argparse.ArgumentParser(prog="quire health", description="Ask a server whether it takes requests.")
    parser.add_argument("--url", help="of the server; default: every server that runs here, found in /proc")
    parser.add_argument("--node", metavar="HOST:PORT", help="ask a node, `quire engine`, instead of a server")
    for name, what in _OF_LINKS.items():
        parser.add_argument(f"--{name}", type=Path, metavar="PATH", help=f"with --node: {what}")
    parser.add_argument(f"--{_REMOVED}", type=_refuse, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=4.0, help="seconds to wait for each answer [4]")
    return parser


def _refuse(_value: str) -> NoReturn:
    raise argparse.ArgumentTypeError("no flag any more, leave it out: the certificates prove who asks a node")


def _node(asked: argparse.Namespace) -> int:
    from quire_server.engine.nodes import probe  # noqa: PLC0415 - takes more than the standard library

    secrets = [getattr(asked, name.replace("-", "_")) for name in _OF_LINKS]
    trouble = probe.ask(asked.node, *secrets, seconds=asked.timeout)
    print(f"quire health: {asked.node}: {trouble or 'ready'}", file=sys.stderr if trouble else sys.stdout)
    return 1 if trouble else 0


def listening(proc: Path = Path("/proc")) -> set[str]:
    """Addresses of the servers among the visible processes: URLs, or paths of Unix sockets."""
    found: set[str] = set()
    for process in _servers(proc):
        sockets = _sockets(process)
        for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for words in _rows(process / "net" / name):
                if len(words) > 9 and words[3] == _LISTENS_TCP and words[9] in sockets:
                    found.add(_url(words[1], family))
        for words in _rows(process / "net" / "unix"):
            if len(words) > 7 and words[3] == _LISTENS_UNIX and words[6] in sockets:
                found.add(" ".join(words[7:]))
    return found


def _servers(proc: Path) -> Iterator[Path]:
    for process in proc.glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if any(_SERVERS.search(word) and words[i + 1 : i + 2] == ["serve"] for i, word in enumerate(words[:4])):
            yield process


def _sockets(process: Path) -> set[str]:
    """The inodes of a process's open sockets; empty for another user's process."""
    found = set()
    try:
        for link in (process / "fd").iterdir():
            try:
                target = str(link.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except OSError:
        pass
    return found


def _rows(table: Path) -> list[list[str]]:
    try:
        return [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []


def _url(address: str, family: int) -> str:
    """The URL of `0100007F:1F90`: 32-bit words in the machine's order, then the port."""
    words, _, port = address.partition(":")
    packed = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    host = socket.inet_ntop(family, packed)
    host = _EVERYWHERE.get(host, host)
    return f"http://[{host}]:{int(port, 16)}" if ":" in host else f"http://{host}:{int(port, 16)}"


def trouble_at(address: str, timeout: float) -> str:
    """Return the trouble at an address after trying HTTP and HTTPS, since the address does not tell which it serves."""
    trouble = _trouble(address, timeout)
    if not trouble.startswith(_SILENT):
        return trouble
    secure = _trouble(_secure(address), timeout)
    return trouble if secure.startswith(_SILENT) else secure


def _secure(address: str) -> str:
    return address.replace("http://", "https://", 1) if address.startswith("http://") else f"https+unix:{address}"


def _trouble(address: str, timeout: float) -> str:
    """Why the server at this address takes no requests; empty if it does."""
    link = connection(address, timeout)
    try:
        link.request("GET", _PATH)
        reply = link.getresponse()
        if reply.status == http.client.OK:
            return ""
        try:
            return str(json.loads(reply.read())["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"answers {reply.status}"
    except (OSError, http.client.HTTPException) as error:
        return f"{_SILENT}: {error or type(error).__name__}"
    finally:
        link.close()


def connection(address: str, timeout: float, tls: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
    """A connection to a URL or a socket's path; without `tls` any certificate is accepted."""
    parts = urlsplit(address)
    if parts.scheme == "https+unix":
        return _UnixConnection(parts.path, timeout, tls or _unchecked())
    if not parts.scheme:
        return _UnixConnection(address, timeout)
    if parts.scheme == "https":
        port = parts.port or 443
        return http.client.HTTPSConnection(parts.hostname or "", port, timeout=timeout, context=tls or _unchecked())
    return http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout)


def _unchecked() -> ssl.SSLContext:
    """A context that accepts any certificate: the server's name is unknown here, and no secret is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str, timeout: float, tls: ssl.SSLContext | None = None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path
        self._tls = tls

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock)

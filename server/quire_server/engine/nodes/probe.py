"""`quire health --node`: asks a node with a front's secrets whether it serves; for the probes of a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

from quire_engine.contract.errors import ConfigError
from quire_engine.links.link_security import link_security
from quire_server.engine.nodes.addresses import parse_address
from quire_server.engine.nodes.connecting import trouble_of


def ask(node: str, cert: Path | None, key: Path | None, ca: Path | None, *, seconds: float) -> str:
    """Why it takes no requests; empty if it does."""
    try:
        address = parse_address(node, "--node")
        security = link_security(cert, key, ca)
    except ConfigError as error:
        return str(error)
    return asyncio.run(trouble_of(address, security, seconds))

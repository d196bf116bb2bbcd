"""The settings of a node alone, which `quire engine` reads and `quire serve` refuses.

Promises: a node's other settings are those of `quire serve` for its model, memory, schedule, links and logs. Must not
know: torch, HTTP.
"""

from __future__ import annotations

from pydantic import BaseModel

from quire_engine.contract.config import KVTransport, Role
from quire_server.settings.values import option


class NodeFields(BaseModel):
    """The record of `quire engine`."""

    listen: str | None = option(None, "Nodes", "HOST:PORT on which the node serves fronts")
    metrics_listen: str | None = option(None, "Nodes", "HOST:PORT of the node's own /metrics")
    kv_listen: str | None = option(None, "Nodes", "HOST:PORT where nodes fetch KV blocks of prompts, on a CPU")
    kv_address: str | None = option(
        None, "Nodes", "HOST:PORT at which other nodes reach --kv-listen; default: the same"
    )
    kv_transport: KVTransport = option("tcp", "Nodes", "transport of KV blocks; all but tcp need an extra")
    kv_trust_network: bool = option(
        False, "Nodes", "the nodes' network is private; transports other than tcp need that"
    )
    role: Role = option("both", "Nodes", "prefill computes long prompts for others, by --kv-listen")

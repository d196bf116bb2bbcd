"""Nodes and a front in one process: real sockets, supervisors and engine processes, whose tokens are invented.

A `Proxy` stands between a front and a node, and cuts one direction, or both, or ends its connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.plan import EnginePlan
from quire_engine.links.link_security import LinkSecurity
from quire_server.engine.nodes.addresses import Address, Source
from quire_server.engine.nodes.node import Node
from quire_server.engine.nodes.node_set import NodeSet
from quire_server.engine.replica_routing import Router
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import EngineState, Supervisor
from support.plans import changed
from support.supervising import FAKE, Client

NO_SECRETS = LinkSecurity()


@dataclass(slots=True)
class Served:
    """A node, its supervisor, and where it listens."""

    node: Node
    supervisor: Supervisor
    address: Address
    started: asyncio.Task[None] | None = None
    start: Callable[[], Awaitable[None]] | None = None

    def begin(self) -> None:
        """Load the model now."""
        assert self.start is not None
        self.started = asyncio.ensure_future(self.start())  # type: ignore[arg-type]


@asynccontextmanager
async def served_node(
    model: str = "ok",
    *,
    security: LinkSecurity = NO_SECRETS,
    silence: float = 2.0,
    port: int = 0,
    change: Callable[[EnginePlan], EnginePlan] = lambda plan: plan,
    max_restarts: int = 5,
    waits: bool = True,
) -> AsyncIterator[Served]:
    policy = RestartPolicy(
        first_backoff_seconds=0.01, absent_seconds=30.0, hang_seconds=60.0, max_restarts=max_restarts
    )
    config = EngineConfig(model=model, alive_seconds=0.5, tells_prefixes=True)
    supervisor = Supervisor(config, policy, program=FAKE)
    node = Node(supervisor, security, silence_seconds=silence)
    (address,) = await node.listen(Address("127.0.0.1", port))

    async def start() -> None:
        plan = await supervisor.start()
        node.started(change(changed(plan, identity={"checkpoint": "the model", "numerics": "same"})))

    try:
        if waits:
            await start()
        yield Served(node, supervisor, address, start=start)
    finally:
        await node.close()
        await supervisor.stop()


@asynccontextmanager
async def front(
    addresses: Sequence[Address | Source],
    *,
    files: Sequence[Path] = (),
    security: LinkSecurity = NO_SECRETS,
    silence: float = 2.0,
    wait: float = 30.0,
) -> AsyncIterator[tuple[NodeSet, Client]]:
    """A started front with these nodes."""
    together = NodeSet(
        [
            *(each if isinstance(each, Source) else Source(each) for each in addresses),
            *(Source(file=path) for path in files),
        ],
        security,
        router=Router("least_tokens"),
        model="here",
        silence_seconds=silence,
        failover_seconds=wait,
    )
    client = Client()
    together.on_step = client.on_step
    try:
        await together.start()
        yield together, client
    finally:
        await together.stop()


@asynccontextmanager
async def cluster(count: int = 2, model: str = "ok", **options: float) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(served_node(model)) for _ in range(count)]
        proxies = [await stack.enter_async_context(proxy(node.address)) for node in nodes]
        together, client = await stack.enter_async_context(front([each.address for each in proxies], **options))
        await ready(together, count)
        yield Cluster(nodes, proxies, together, client)


@dataclass(slots=True)
class Cluster:
    """Nodes, each behind a proxy, and one front."""

    nodes: list[Served]
    proxies: list[Proxy]
    set: NodeSet
    client: Client


async def ready(together: NodeSet, count: int, seconds: float = 20.0) -> None:
    """Wait until so many nodes serve."""
    async with asyncio.timeout(seconds):
        while sum(row.state == EngineState.READY.value for row in together.rows()) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@dataclass(slots=True)
class Proxy:
    """Passes bytes on between fronts and one node; what is cut is swallowed."""

    node: Address
    address: Address
    to_node: bool = True
    to_front: bool = True
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self.node.host, self.node.port)
        except OSError:
            writer.close()
            return
        self.writers += [writer, far_writer]
        there = self._pass(reader, far_writer, lambda: self.to_node)
        back = self._pass(far_reader, writer, lambda: self.to_front)
        await asyncio.gather(there, back)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_open: Callable[[], bool]
    ) -> None:
        try:
            while data := await reader.read(1 << 16):
                if is_open():
                    writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    def heal(self) -> None:
        self.to_node = self.to_front = True

    def end_connections(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@asynccontextmanager
async def proxy(node: Address) -> AsyncIterator[Proxy]:
    made = Proxy(node, node)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.address = Address(*server.sockets[0].getsockname()[:2])
    try:
        yield made
    finally:
        server.close()
        made.end_connections()
        await server.wait_closed()

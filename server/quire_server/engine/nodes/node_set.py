"""The engines of a front without an engine of its own: nodes at fixed addresses, or at those of a name.

Promises: all nodes that serve have the same model, and hold whatever request the first ones could hold; a name is asked
for again and again, and nodes join and leave while the front serves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire_engine.contract.errors import EngineDead
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import EngineStats
from quire_engine.links.link_security import LinkSecurity
from quire_server.background import begin
from quire_server.engine.nodes.addresses import Source, members
from quire_server.engine.nodes.frames import NodeState
from quire_server.engine.nodes.remote_engine import RemoteEngine
from quire_server.engine.replica_routing import Router
from quire_server.engine.replicas import FAILOVER_SECONDS, Replica, ReplicaSet
from quire_server.engine.supervisor import EngineState

RESOLVE_SECONDS = 5.0  # between two questions for a name's addresses
_READ_SECONDS = 0.5  # between two looks at a file of addresses, which costs less
_OTHERS_SECONDS = 2.0  # how long a start waits for further nodes that are connected, once one is ready
_PROMISED = 7 / 8  # share of the smallest pool that requests are held against: a node's next start may find less memory

log = logging.getLogger("quire.nodes")


class NodeSet(ReplicaSet):
    """Nodes as one engine; replicas are named by their addresses."""

    def __init__(
        self,
        sources: Sequence[Source],
        security: LinkSecurity,
        *,
        router: Router,
        model: str,
        tokenizer: str = "",
        failover_seconds: float = FAILOVER_SECONDS,
        silence_seconds: float,
        resolve_seconds: float = RESOLVE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`model`: the front's directory with tokenizer and templates; `tokenizer`: the digest of its tokenizer."""
        super().__init__(router=router, failover_seconds=failover_seconds, clock=clock)
        self._sources, self._security = tuple(sources), security
        self._model, self._tokenizer = model, tokenizer
        if all(source.file is not None for source in self._sources):
            resolve_seconds = min(resolve_seconds, _READ_SECONDS)
        self._silence, self._resolve_seconds = silence_seconds, resolve_seconds
        self._nodes: dict[str, RemoteEngine] = {}
        self._promised: EnginePlan | None = None  # what every node must hold; None: not known yet
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    # ---------------------------------------------------------------- life

    async def start(self) -> EnginePlan:
        """Wait until a node is ready; returns the plan that requests are held against."""
        await self._refresh()
        self._watching = begin(self._watch, "nodes")
        await asyncio.wait([self._first])
        deadline = self._clock() + _OTHERS_SECONDS
        while self._clock() < deadline and any(each.is_coming for each in self._nodes.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        self._promised = _promised([node.plan for node in self._nodes.values() if node.plan is not None])
        return replace(self._promised, model=replace(self._promised.model, path=self._model))

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await super().stop()

    def trouble(self) -> str | None:
        """Why no node serves now, without an address, since probes show it; None: at least one does."""
        if any(node.state is EngineState.READY for node in self._nodes.values()):
            return None
        return "no node serves" if self._nodes else "no node is known"

    async def inspect(self, what: str, argument: str = "{}") -> bytes:
        """Answer like `ReplicaQuestions.inspect`; without a name the first node that serves answers."""
        if not self._nodes:
            raise EngineDead("no node is known")
        return await self._questions.inspect(what, argument)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._resolve_seconds)
            await self._refresh()

    async def _refresh(self) -> None:
        """Ask for the addresses of names; nodes join, and those that are gone leave."""
        found, is_whole = await members(self._sources)
        names = {str(address): address for address in found}
        before = set(self._nodes)
        # In the order in which they are written, which is that of every list of them.
        for name in [name for name in names if name not in self._nodes]:
            self._add(name, RemoteEngine(
                names[name], self._security, check=self._trouble_of,
                quarantine=self.quarantine, silence_seconds=self._silence,
            ))  # fmt: skip
        for name in [name for name in self._nodes if name not in names]:
            # One that still answers has left the name first, as one that drains does.
            if is_whole and self._nodes[name].state in (EngineState.LOST, EngineState.STARTING):
                await self._remove(name)
        if before != set(self._nodes):
            self.on_members()

    def _add(self, name: str, node: RemoteEngine) -> None:
        made = self._join(name, node)
        self._nodes[name] = node
        node.on_drain = lambda: self._node_drains(made)
        node.on_new_engine = lambda: self._begins_anew(made)
        node.begin()

    async def _remove(self, name: str) -> None:
        node = self._nodes.pop(name)
        log.info("the node at %s is gone from its name", name)
        del self._replicas[name], self._engines[name]
        self._router.leaves(name)
        self._sums.lost(name)
        self._sums.take(name, EngineStats())
        await node.stop()

    def _begins_anew(self, replica: Replica) -> None:
        """The node has another engine than before: nothing is cached there, and its totals begin at 0."""
        self._router.joins(replica.name)
        self._sums.lost(replica.name)

    def _ready(self, arrived: Replica) -> None:
        if not self._first.done():
            self._first.set_result(None)
        super()._ready(arrived)
        self.on_members()

    def _node_drains(self, replica: Replica) -> None:
        """A node ends: others take its streams, as long as there are any."""
        log.info("the node at %s drains; it has %d streams of this front", replica.name, len(replica.streams))
        self._empty(replica)

    # ---------------------------------------------------------------- what a node must be

    def _trouble_of(self, told: NodeState) -> str:
        """Why a node cannot serve here; empty: it can, or is not ready yet."""
        if told.plan is None:
            return ""
        if self._tokenizer and told.tokenizer and told.tokenizer != self._tokenizer:
            return "it serves another model: its tokenizer.json is not the one here"
        plans = [node.plan for node in self._nodes.values() if node.plan is not None]
        first = self._promised or (plans[0] if plans else told.plan)
        if told.plan.identity.checkpoint != first.identity.checkpoint:
            return "it serves another model than the first node: the files of the model differ"
        return "" if self._promised is None else _shortfall(told.plan, self._promised)


def _shortfall(plan: EnginePlan, promised: EnginePlan) -> str:
    """The size that a node lacks to take any request that the promised plan allows; empty: it lacks none."""
    for name, flag, has, needed in (
        ("max_model_len", "--max-model-len", plan.scheduler.max_model_len, promised.scheduler.max_model_len),
        ("blocks in its pool", "--kv-memory", plan.scheduler.num_blocks, promised.scheduler.num_blocks),
    ):
        if has < needed:
            return f"it has {has} {name}, this server promises {needed}; set {flag} alike on all nodes"
    has, needed = plan.scheduler.limits.block_size, promised.scheduler.limits.block_size
    return "" if has == needed else f"its blocks are of {has} tokens, not {needed}; --set block_size={needed} mends it"


def _promised(plans: Sequence[EnginePlan]) -> EnginePlan:
    """The plan that every one of these engines can keep, and that their next ones should be able to."""
    plan = min(plans, key=lambda each: each.scheduler.max_model_len)
    sizes = plan.scheduler
    least = int(min(each.scheduler.num_blocks for each in plans) * _PROMISED)
    blocks = max(least, sizes.num_blocks_for(sizes.max_model_len))
    return replace(plan, scheduler=replace(sizes, num_blocks=min(blocks, sizes.num_blocks)))

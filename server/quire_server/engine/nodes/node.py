"""A node: one supervised engine that serves fronts on other machines.

Owns the listening socket and the sessions of fronts. Promises: a peer that has not proven itself costs one of a
bounded number of connections for a bounded time, and nothing it sends is decoded; a front that goes away takes its
requests with it; a node that drains hands its streams back to the fronts while another node can take them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from quire_engine.contract.errors import ConfigError, QuireError
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import NAME_MODEL, EngineStats, GenerationRequest, StepOutput, TokenOutput
from quire_engine.links.handshake import HELLO_BYTES, Refused, check_hello, hello
from quire_engine.links.link_security import LinkSecurity
from quire_engine.own_pauses import OwnPauses
from quire_engine.routing.index import MOST_BLOCKS
from quire_server.background import begin
from quire_server.engine.nodes.addresses import Address, resolve
from quire_server.engine.nodes.checks import wrong_in
from quire_server.engine.nodes.frames import FROM_FRONT, FROM_NODE, NodeState
from quire_server.engine.nodes.link import Link, UnfinishedFrames
from quire_server.engine.nodes.sessions import STATS_SECONDS, PrefixLedger, Session, ahead_of
from quire_server.engine.stats_sum import OF_A_STEP
from quire_server.engine.supervisor import EngineState, Supervisor
from quire_server.metrics.node_metrics import NodeMetrics
from quire_server.showing.version import VERSION

HANDSHAKE_SECONDS = 5.0  # for TLS and both proofs
MOST_UNPROVEN = 64  # connections whose peers have not proven themselves yet
_BACKLOG = 128
_TELL_SECONDS = 10.0  # between two lines about peers that were refused
_FRONTS_PATIENCE = 5.0  # times `silence_seconds`: without a sign of life of a front, which is given up then
_CLOSING_SECONDS = 1.0  # for the last frames of a node that ends

log = logging.getLogger("quire.nodes")


class Node:
    """The sessions of fronts in front of one `Supervisor`, whose `on_step`, `on_lost` and `on_ready` it takes."""

    def __init__(
        self,
        engine: Supervisor,
        security: LinkSecurity,
        *,
        silence_seconds: float,
        tokenizer: str = "",
        metrics: NodeMetrics | None = None,
    ) -> None:
        """`silence_seconds`: how soon fronts give up a silent node; `tokenizer`: its digest; `metrics`: are kept."""
        self.num_refused = 0  # peers that did not prove themselves
        self._engine, self._security, self._metrics = engine, security, metrics
        self._silence = _FRONTS_PATIENCE * silence_seconds
        self._instance, self._tokenizer = secrets.token_hex(8), tokenizer
        self._plan: EnginePlan | None = None
        self._draining = False
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._owners: dict[str, Session] = {}
        self._unproven: dict[asyncio.Task[None], str] = {}  # the peer's host, the oldest first
        self._unfinished = UnfinishedFrames()
        self._ledger = PrefixLedger(MOST_BLOCKS)
        self._stats = EngineStats()
        self._told = self._state()
        self._refused_at = -_TELL_SECONDS
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: list[socket.socket] = []
        engine.on_step, engine.on_lost, engine.on_ready = self._deliver, self._lost, self._ready

    @property
    def num_live(self) -> int:
        """Unfinished requests of all fronts."""
        return len(self._owners)

    @property
    def num_fronts(self) -> int:
        return len(self._sessions)

    async def listen(self, address: Address) -> list[Address]:
        """Listen; returns where. Raises ConfigError for an address that cannot be had, or must not be."""
        try:
            found = await resolve(address)
        except OSError as error:
            raise ConfigError(f"--listen {address}: {error.strerror or error}") from None
        self._security.check_reach(f"--listen {address}", (each.host for each in found))
        for each in found:
            self._sockets.append(_bound(each))
        self._tasks = [begin(partial(self._accept, each), "node-accept") for each in self._sockets]
        self._tasks.append(begin(self._watch, "node-watch"))
        return [Address(*each.getsockname()[:2]) for each in self._sockets]

    def started(self, plan: EnginePlan) -> None:
        """The engine is ready. `plan` with names of checkpoint and numerics that hold on all machines."""
        self._plan = plan
        blocks = plan.scheduler.num_blocks
        host = plan.scheduler.num_host_blocks
        self._stats = EngineStats(blocks_total=blocks, blocks_free=blocks, host_blocks_total=host)
        if self._metrics is not None:
            self._metrics.begin(plan)
        self._name_model()
        self._tell_state()
        for session in self._sessions:
            session.tell(stats=self._stats)

    def drain(self) -> None:
        """Tell all fronts to send nothing new and to take their streams elsewhere."""
        self._draining = True
        self._tell_state()

    async def empty(self) -> None:
        """Wait until no request is unfinished."""
        while self._owners:  # noqa: ASYNC110 - a node ends once
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End all connections and stop listening. Idempotent."""
        tasks = [*self._tasks, *self._unproven]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in self._sockets:
            each.close()
        self._tasks, self._sockets = [], []
        following = list(self._sessions.values())
        for session in list(self._sessions):
            session.link.close()
        if following:
            await asyncio.wait(following, timeout=_CLOSING_SECONDS)
        for session in list(self._sessions):
            session.link.abort("the node has ended")
        await asyncio.gather(*following, return_exceptions=True)

    # ---------------------------------------------------------------- connections

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listening)
            except OSError as error:  # such as too many open files
                log.warning("no connection can be accepted: %s", error.strerror or error)
                await asyncio.sleep(0.2)
                continue
            if len(self._unproven) >= MOST_UNPROVEN:
                self._make_place()
            task = asyncio.create_task(self._admit(connection, Address(*peer[:2])), name="node-handshake")
            self._unproven[task] = peer[0]
            task.add_done_callback(lambda done: self._unproven.pop(done, None))

    def _make_place(self) -> None:
        """Turn away the oldest unproven peer of the host that has most of them: strangers keep no front out."""
        (host, _), *_ = Counter(self._unproven.values()).most_common(1)
        task = next(task for task, each in self._unproven.items() if each == host)
        del self._unproven[task]
        task.cancel()
        self._refuse(host, f"{MOST_UNPROVEN} peers have not proven themselves yet, most of them from there")

    async def _admit(self, connection: socket.socket, peer: Address) -> None:
        """The handshake with one peer, and its session if it has proven itself."""
        link = Link(reads=FROM_FRONT, sends=FROM_NODE, unfinished=self._unfinished)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._shake_hands(link, connection)
        except Refused as refusal:
            self._refuse(peer.host, str(refusal))
        except TimeoutError:
            self._refuse(peer.host, f"it has not proven itself within {HANDSHAKE_SECONDS:g} s")
        except OSError as error:  # ssl.SSLError is one
            self._refuse(peer.host, getattr(error, "reason", None) or error.strerror or str(error))
        except asyncio.CancelledError:
            link.abort("its place was given to another peer")
            raise
        else:
            self._begin(link, peer)
            return
        link.abort("refused")

    async def _shake_hands(self, link: Link, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        context = self._security.listening
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if context is None:
                await loop.connect_accepted_socket(lambda: link, connection)
            else:
                await loop.connect_accepted_socket(
                    lambda: link, connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
                )
        except BaseException:
            connection.close()
            raise
        link.write(hello())
        check_hello(await link.exactly(HELLO_BYTES))

    def _refuse(self, peer: str, why: str) -> None:
        """Log a refusal, but not each of many."""
        self.num_refused += 1
        if time.monotonic() >= self._refused_at + _TELL_SECONDS:
            self._refused_at = time.monotonic()
            log.warning("a peer at %s was refused (%d so far): %s", peer, self.num_refused, why)

    def _begin(self, link: Link, peer: Address) -> None:
        session = Session(str(peer), link, self._engine, self._owners, wrong_in=self._wrong_in)
        self._sessions[session] = asyncio.create_task(self._follow(session), name="node-session")
        log.info("a front has connected from %s; there are %d", peer, len(self._sessions))
        session.greet(self._state(), self._stats, self._ledger.snapshot())
        link.begin(session.receive)

    def _wrong_in(self, request: GenerationRequest) -> str:
        return wrong_in(request, self._plan) if self._plan is not None else "no engine yet"

    async def _follow(self, session: Session) -> None:
        """Wait until the front is gone, then forget its session."""
        await asyncio.wait([session.link.lost])
        del self._sessions[session]
        log.info("the front at %s is gone: %s; %d requests of it end", session.name, session.link.why_lost,
                 len(session.live))  # fmt: skip
        session.close()

    async def _watch(self) -> None:
        """Give up fronts that are silent; tell those that are idle of the load."""
        pauses = OwnPauses(STATS_SECONDS)
        while True:
            await asyncio.sleep(STATS_SECONDS)
            pauses.look()
            now = time.monotonic()
            if self._plan is None:
                self._tell_state()  # how far the start is
            for session in list(self._sessions):
                silence = pauses.silence(session.link.heard)
                if silence > self._silence:
                    session.link.abort(f"no sign of life for {silence:.1f} s")
                elif self._plan is not None and session.told_at < now - STATS_SECONDS and self._owners:
                    session.tell(stats=_of_no_step(self._stats), others=ahead_of(self._sessions, session))

    # ---------------------------------------------------------------- the engine

    def _state(self) -> NodeState:
        engine = self._engine
        return NodeState(
            instance=self._instance,
            version=VERSION,
            state=engine.state.value,
            draining=self._draining,
            proving=engine.is_proving,
            restarts=engine.restarts,
            pid=engine.pid,
            tokenizer=self._tokenizer,
            plan=self._plan,
            progress=None if self._plan is not None else engine.progress,
        )

    def _tell_state(self) -> None:
        state = self._state()
        if state != self._told:
            self._told = state
            for session in self._sessions:
                session.link.send(state)

    def _lost(self) -> None:
        """The engine is gone; the next one begins with nothing cached. Requests wait in its supervisor's journal."""
        self._unfinished = UnfinishedFrames()
        self._ledger = PrefixLedger(MOST_BLOCKS)
        for session in self._sessions:
            session.forget_prefixes()
        self._tell_state()
        if self._engine.state is EngineState.DEAD:
            # The fronts have them in journals of their own, and take them elsewhere when this node is gone.
            self._engine.surrender(suspects=True)

    def _ready(self) -> None:
        if self._metrics is not None:
            self._metrics.restarted()
        self._name_model()
        self._tell_state()

    def _name_model(self) -> None:
        """Tell an engine that passes KV blocks on which model it has, by the name that holds on all machines."""
        if self._plan is not None and self._plan.transfer.address:
            naming = asyncio.create_task(self._name(self._plan.identity.checkpoint), name="node-model")
            self._tasks = [*(each for each in self._tasks if not each.done()), naming]

    async def _name(self, digest: str) -> None:
        try:
            await self._engine.control(NAME_MODEL, json.dumps({"digest": digest}))
        except QuireError as error:  # the engine has ended; `_ready` comes with the next one
            log.warning("KV blocks are not passed on: %s", error)

    def _deliver(self, step: StepOutput) -> None:
        """Pass a step's outputs to the fronts that they are for, and tell the others how busy the engine is."""
        if step.stats.blocks_total:
            self._stats = step.stats
        if self._metrics is not None:
            self._metrics.observe(step.stats, sum(len(each.token_ids) for each in step.outputs))
        if step.prefixes is not None:
            self._ledger.apply(step.prefixes)
        own: dict[Session, list[TokenOutput]] = {}
        for output in step.outputs:
            session = self._owners.get(output.request_id)
            if session is not None:
                own.setdefault(session, []).append(output)
        now = time.monotonic()
        for session in self._sessions:
            outputs = own.get(session, ())
            if not outputs and step.prefixes is None and session.told_at > now - STATS_SECONDS:
                continue
            session.tell(
                outputs=outputs,
                step_id=step.step_id,
                stats=self._stats if outputs else _of_no_step(self._stats),
                prefixes=step.prefixes,
                others=ahead_of(self._sessions, session) if len(self._sessions) > 1 else (0, 0),
            )
        if self._told.proving != self._engine.is_proving:
            self._tell_state()


def _of_no_step(stats: EngineStats) -> EngineStats:
    """Return the statistics without what belongs to one step; the fronts whose step it was count that."""
    nothing: dict[str, Any] = dict.fromkeys(OF_A_STEP, 0)
    return replace(stats, **nothing)


def _bound(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address.host, address.port))
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ConfigError(f"--listen {address}: {error.strerror}") from None
    return made

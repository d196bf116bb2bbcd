"""One API server at the main process: its requests in the queue of all, and the requests that it passes on.

Promises: an API server learns of its own requests only, and its end ends these and no others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from starlette.types import ASGIApp

from quire_engine.contract.errors import ProtocolError
from quire_engine.contract.types import TokenOutput
from quire_engine.process.transport import Abort, Hold, Release
from quire_server.api_servers.forwarding import Forwarded
from quire_server.api_servers.frames import (
    FROM_API_SERVER,
    FROM_MAIN,
    Began,
    Came,
    Done,
    Left,
    MainState,
    Named,
    Order,
    Outputs,
    Place,
    Placed,
    Ready,
    Took,
)
from quire_server.engine.engine_client import EngineClient, RequestStream
from quire_server.engine.nodes.link import Link
from quire_server.errors import ApiError, ErrorFacts, NotReady, facts_of
from quire_server.metrics.shared_counts import Guest
from quire_server.state import ServerState


class Session:
    """The main process's end of one link."""

    def __init__(self, app: ASGIApp) -> None:
        """`app`: answers what the API server passes on."""
        self.link = Link(reads=FROM_API_SERVER, sends=FROM_MAIN)
        self.accepts: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # done when it listens
        self._forwarded = Forwarded(app, self.link.send)
        self._state: ServerState | None = None
        self._guest: Guest | None = None
        self._relays: dict[str, _Relay] = {}
        self._outputs: list[TokenOutput] = []
        self._is_flushing = False
        self._told_full = False
        self._tokens = count(1)
        self._orders: dict[int, asyncio.Future[None]] = {}
        self._counting = 0  # orders to send what was counted that are not carried out yet

    @property
    def num_live(self) -> int:
        """The number of this API server's unfinished requests."""
        return len(self._relays)

    @property
    def is_counting(self) -> bool:
        """Whether counts are on their way, which show that it lives: other orders may take as long as its streams."""
        return self._counting > 0

    def serve(self, state: ServerState) -> None:
        """The engine is ready: take requests."""
        self._state, self._guest = state, Guest(state.metrics)

    def tell(self, state: MainState) -> None:
        """The common state has changed."""
        self.link.send(state)

    async def order(self, what: str) -> None:
        """Have something done; returns when it is, or when the API server is gone."""
        if self.link.lost.done():
            return
        token = next(self._tokens)
        done = self._orders[token] = asyncio.get_running_loop().create_future()
        self._counting += what == "count"
        self.link.send(Order(token=token, what=what))
        try:
            await done
        finally:
            self._counting -= what == "count"
            del self._orders[token]

    def receive(self, frame: Any) -> None:
        """Do what a frame asks for. Raises ProtocolError for what no API server sends."""
        match frame:
            case Place():
                self.link.send(Placed(request_id=frame.request.request_id, refusal=self._place(frame)))
            case Abort():
                relay = self._relays.get(frame.request_id)
                if relay is not None:
                    relay.abort(frame.request_id)
            case Hold() | Release():
                self._pace(frame)
            case Named() if self._state is not None:
                self._state.names.add(frame.names, frame.request_ids)
            case Done():
                self._take(frame)
            case Began() | Came() | Left() | Took():
                self._forwarded.receive(frame)
            case Ready():
                if not self.accepts.done():
                    self.accepts.set_result(None)
            case _:
                raise ProtocolError(f"a {type(frame).__name__} frame, which no API server sends")

    def flush(self) -> None:
        """Send the outputs that have come since the last time, and whether the queue is full if that is news."""
        self._is_flushing = False
        if self._state is None:
            return
        taken, most, seats, rate = self._state.client.occupancy()
        if not self._outputs and self._told_full == (taken >= most):
            return
        outputs, self._outputs = tuple(self._outputs), []
        self._told_full = taken >= most
        self.link.send(Outputs(outputs=outputs, taken=taken, most=most, seats=seats, rate=rate))

    def close(self) -> None:
        """The API server is gone: its requests end."""
        num_live = self.num_live
        for request_id, relay in list(self._relays.items()):
            relay.abort(request_id)
        self._forwarded.close()
        for done in self._orders.values():
            if not done.done():
                done.set_result(None)
        if self._guest is not None:
            self._guest.close(num_live)
        self._state = None

    def _take(self, done: Done) -> None:
        if done.counts is not None and self._guest is not None:
            self._guest.add(done.counts)
        waiting = self._orders.get(done.token)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def _place(self, asked: Place) -> ErrorFacts | None:
        """Put a request into the queue; the facts of its refusal, or None."""
        state, request = self._state, asked.request
        try:
            if state is None:
                raise NotReady
            if state.draining:
                state.metrics.reject("draining")
                raise state.refusal()
            if asked.list_tokens is not None:
                state.client.check_budget(request.tenant, asked.list_tokens)
            relay = _Relay(state.client, self._push, self._forget)
            state.client.submit(request, relay)
        except ApiError as refusal:
            return facts_of(refusal)
        self._relays[request.request_id] = relay
        state.metrics.usage.add(asked.account, requests=1, prompt=len(request.prompt_token_ids))
        return None

    def _pace(self, frame: Hold | Release) -> None:
        relay = self._relays.get(frame.request_id)
        if relay is None or self._state is None:
            return
        client, request = self._state.client, relay.request(frame.request_id)
        if isinstance(frame, Hold) and not relay.is_held:
            relay.is_held = True
            client.hold([request])
        elif isinstance(frame, Release) and relay.is_held:
            relay.is_held = False
            client.release_held([request])

    def _push(self, output: TokenOutput) -> None:
        self._outputs.append(output)
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self.flush)

    def _forget(self, request_id: str) -> None:
        self._relays.pop(request_id, None)


class _Relay(RequestStream):
    """The outputs of one accepted request, passed to its API server."""

    def __init__(
        self, client: EngineClient, push: Callable[[TokenOutput], None], forget: Callable[[str], None]
    ) -> None:
        super().__init__(client)
        self.is_held = False
        self._push, self._forget = push, forget

    def deliver(self, output: TokenOutput) -> None:
        self._push(output)
        if output.finish is not None:
            self.choice_ended(output.request_id)
            if not self.is_live:
                self._forget(output.request_id)

    def abort(self, request_id: str) -> None:
        super().abort(request_id)
        self._forget(request_id)

    def fail(self, request_id: str, error: str, code: str) -> None:
        super().fail(request_id, error, code)
        for output in self.unread():
            self._push(output)
        self._forget(request_id)

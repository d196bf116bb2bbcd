"""The operator's orders to a running server: drain and undo it, end requests, empty the prefix cache, reload keys.

Every order is answered with its effect, and logged: `logs.requests` has a line for each, with who gave it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire_engine.contract.errors import QuireError
from quire_engine.contract.types import RESET_PREFIX_CACHE
from quire_server.errors import AbortedByOperator, Conflict, NotReady, NotRemembered
from quire_server.http.body import json_body
from quire_server.http.credentials import Reloaded
from quire_server.http.openapi import error_response
from quire_server.routes.usage import UsageReply, usage_reply
from quire_server.state import ServerState, choose_by_query, state_of

RETRY_SECONDS = 2.0  # an engine restart takes about as long

router = APIRouter(prefix="/admin", tags=["admin"])

log = logging.getLogger("quire.admin")


class DrainStatus(BaseModel):
    """Whether new requests are refused, and the number of accepted ones that are left."""

    draining: bool
    in_flight: int


class AbortOrder(BaseModel):
    """The requests to end: exactly one of the fields."""

    model_config = ConfigDict(extra="forbid")

    request_id: Annotated[
        str | None, Field(min_length=1, max_length=256, description="x-request-id, a reply's id, or the engine's own")
    ] = None
    tenant: Annotated[str | None, Field(min_length=1, max_length=64, description="all that this tenant has")] = None
    all: Annotated[bool, Field(description="all that there is")] = False

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        if [self.request_id is not None, self.tenant is not None, self.all].count(True) != 1:
            raise ValueError("name the requests by one of 'request_id', 'tenant' and 'all': true")
        return self


class Aborted(BaseModel):
    """The ended engine requests, of which a client's request with several prompts has several."""

    num_aborted: int
    request_ids: list[str]  # the clients' names of the requests, each once


class CacheDropped(BaseModel):
    """The KV blocks whose cached content was forgotten."""

    device_blocks: int  # unreferenced blocks of the pool
    host_blocks: int  # blocks of host memory, with their files on disk


class ReplicaStatus(BaseModel):
    """One of several engines."""

    name: str
    state: str  # starting, ready, restarting, stopped, dead, or lost: a node that cannot be reached
    draining: bool
    streams: int  # unfinished requests
    prompt_tokens_ahead: int  # of those without an output from this engine
    restarts: int
    numerics: str  # streams move among replicas that have this in common
    pid: int | None  # of the engine's process, on its machine
    why: str  # why it does not serve; empty: it does


class ReplicaList(BaseModel):
    """All engines of the server, where there are several."""

    replicas: list[ReplicaStatus]


ReplicaName = Annotated[str, Path(max_length=280, description="the replica's number, from 0, or the node's address")]
_NO_REPLICA: dict[int | str, dict[str, Any]] = {NotRemembered.status: error_response(NotRemembered)}
Order = Annotated[AbortOrder, json_body(AbortOrder)]
_NOT_READY: dict[int | str, dict[str, Any]] = {NotReady.status: error_response(NotReady)}


@router.get("/drain")
async def drain_status(request: Request) -> DrainStatus:
    """Whether the server is draining, and the number of requests that are left."""
    return _status(state_of(request))


@router.post("/drain")
async def drain(request: Request) -> DrainStatus:
    """Refuse new requests with 503 and fail readiness; accepted requests go on. Lasts until it is undone."""
    state = state_of(request)
    if not state.draining:
        state.phase.draining = True
        await state.settle()
        log.warning("draining by order: no new requests are taken; %d are unfinished", state.in_flight)
    return _status(state)


@router.delete("/drain", responses={Conflict.status: error_response(Conflict)})
async def undo_drain(request: Request) -> DrainStatus:
    """Accept requests again. A server that is shutting down still stops."""
    state = state_of(request)
    if state.stopping:
        raise Conflict("The server is shutting down, which cannot be undone.", code="shutting_down")
    if state.draining:
        state.phase.draining = False
        await state.settle()
        log.warning("requests are taken again")
    return _status(state)


@router.post("/abort", responses={NotRemembered.status: error_response(NotRemembered)})
async def abort(order: Order, request: Request) -> Aborted:
    """End requests: their clients get an error, and their memory is free at once."""
    request.scope["state"]["arguments"] = order.model_dump(exclude_defaults=True)
    chosen = _chosen(state_of(request).every, order)
    for state, request_id in chosen:
        state.client.end(request_id, "the operator has ended the request", AbortedByOperator.default_code)
    log.warning("%d requests were ended by order", len(chosen))
    names = dict.fromkeys(state.names.name(request_id) or request_id for state, request_id in chosen)
    return Aborted(num_aborted=len(chosen), request_ids=list(names))


@router.post("/reset-prefix-cache", responses=_NOT_READY, dependencies=[Depends(choose_by_query)])
async def reset_prefix_cache(request: Request) -> CacheDropped:
    """Forget all cached prefixes: in the pool, in host memory and on disk.

    Unfinished requests keep their blocks and get the same answers.
    """
    try:
        answer = await state_of(request).engines.control(RESET_PREFIX_CACHE, "{}")
    except QuireError as error:
        raise NotReady(f"Not done: {error}.", retry_after_seconds=RETRY_SECONDS) from None
    dropped = CacheDropped.model_validate(msgspec.json.decode(answer))
    log.warning("the prefix cache was emptied: %d blocks, %d on the host", dropped.device_blocks, dropped.host_blocks)
    return dropped


@router.get("/replicas")
async def list_replicas(request: Request) -> ReplicaList:
    """The replicas and what they do; none where the server has one engine."""
    replicas = state_of(request).replicas
    rows = [] if replicas is None else replicas.rows()
    return ReplicaList(replicas=[ReplicaStatus.model_validate(row, from_attributes=True) for row in rows])


@router.post("/replicas/{name}/drain", responses=_NO_REPLICA)
async def drain_replica(name: ReplicaName, request: Request) -> ReplicaStatus:
    """Give a replica nothing new and its streams to others, where the same tokens follow. Lasts until it is undone."""
    return _order_replica(state_of(request), name, draining=True)


@router.delete("/replicas/{name}/drain", responses=_NO_REPLICA)
async def undo_replica_drain(name: ReplicaName, request: Request) -> ReplicaStatus:
    """Let a replica take requests again."""
    return _order_replica(state_of(request), name, draining=False)


@router.post("/reload")
async def reload(request: Request) -> Reloaded:
    """Read the files of keys, tenants and certificates again, as SIGHUP does.

    Where one cannot be used, nothing changes and the reply is 400. Streams and connections go on.
    """
    reloaded = await state_of(request).credentials.reload()
    await state_of(request).settle()
    return reloaded


@router.get("/usage", response_model=UsageReply)
async def usage(
    request: Request,
    tenant: Annotated[str | None, Query(max_length=64, description="only this one")] = None,
    day: Annotated[date | None, Query(description="only this one, as in 2026-01-31")] = None,
) -> Response:
    """Requests and tokens by day (UTC), tenant and model, the latest day first."""
    await state_of(request).settle()
    return usage_reply(state_of(request), {}, tenant=tenant, day=day)


def _order_replica(state: ServerState, name: str, *, draining: bool) -> ReplicaStatus:
    row = None if state.replicas is None else state.replicas.drain(name, draining=draining)
    if row is None:
        raise NotRemembered(f"There is no replica {name!r}.")
    log.warning("replica %s %s; it has %d streams", name, "drains" if draining else "takes requests again", row.streams)
    return ReplicaStatus.model_validate(row, from_attributes=True)


def _chosen(states: Sequence[ServerState], order: AbortOrder) -> list[tuple[ServerState, str]]:
    """The live requests that an order names, by the engine's ids, with their models' states. Raises NotRemembered."""
    live = [(state, each) for state in states for each in state.client.live()]
    if order.request_id is None:
        return [(state, each.request_id) for state, each in live if order.all or each.tenant == order.tenant]
    wanted = {name for state in states for name in state.names.find(order.request_id)}
    found = [(state, each.request_id) for state, each in live if each.request_id in wanted]
    if not found:
        raise NotRemembered("No unfinished request has this id.")
    return found


def _status(state: ServerState) -> DrainStatus:
    return DrainStatus(draining=state.draining, in_flight=state.in_flight)
